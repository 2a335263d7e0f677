"""Where prompts and rewards come from."""
