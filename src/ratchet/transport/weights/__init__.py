"""Weight sync over torch.distributed."""
