"""AdamW with linear warm-up, gradient clipping, and the promise that weights stay finite.

Consumes the gradients of a model's parameters, produces new parameters; waits for nothing but the
collectives of sharded parameters, in which all ranks take part.

Parameters of less than float32 have float32 masters here: an update of 1e-6 would be lost in the
rounding of a bfloat16 weight. The model's parameters are the rounded masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ratchet.errors import RunFailed

ADAM_EPSILON: Final = 1e-8
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """One optimiser over a model's trainable parameters.

    A step is refused before anything changes, so nothing ever has to be undone: it is taken only if
    the gradient norm is finite and the new weights are bound to be. Adam's first moment averages
    clipped gradients and its denominator is at least epsilon, so no weight moves further than
    lr x (weight_decay x |w| + max_grad_norm / epsilon); that must keep the largest weight below the
    dtype's largest number. The largest weight is measured after each step, which costs one fused
    norm and also catches what arithmetic cannot explain (a faulty device): that ends the run.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        warmup_steps: int,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [_master(parameter) for parameter in self._parameters]
        decayed = [master for master in self._masters if master.ndim >= 2]
        plain = [master for master in self._masters if master.ndim < 2]  # norms and biases
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=lr,
            betas=betas,
            eps=ADAM_EPSILON,
            fused=True,
        )
        self._lr = lr
        self._warmup_steps = warmup_steps
        self._weight_decay = weight_decay
        self._max_grad_norm = max_grad_norm
        self._num_steps = 0
        self._largest_weight = self._measure_weights()

    @property
    def next_lr(self) -> float:
        """Learning rate of the next step: linear up to the last warm-up step, then constant."""
        if self._num_steps >= self._warmup_steps:
            return self._lr
        return self._lr * (self._num_steps + 1) / self._warmup_steps

    def take_gradients(self) -> None:
        """Add the model's gradients to those that were taken before, in float32: a sum of many in
        bfloat16 loses the small ones. After each micro-batch.
        """
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def gradient_norm(self) -> float:
        """Return the norm of the taken gradients over all parameters and ranks; it is not finite if
        one of them is not, or if their squares overflow float32.
        """
        return _total_norm(self._gradients(), 2.0).item()

    def step(self, grad_norm: float) -> bool:
        """Clip the taken gradients of this norm, apply and drop them; False if refused.

        Raises:
            RunFailed: if a weight is not finite in spite of all checks.
        """
        lr = self.next_lr
        if not (math.isfinite(grad_norm) and self._stays_finite(lr)):
            self.drop_gradients()
            return False
        for group in self._adam.param_groups:
            group["lr"] = lr
        if grad_norm > self._max_grad_norm:
            for gradient in self._gradients():
                gradient.mul_(self._max_grad_norm / grad_norm)
        self._adam.step()
        self._num_steps += 1
        self.drop_gradients()
        self._round_masters()
        self._largest_weight = self._measure_weights()
        if not math.isfinite(self._largest_weight):
            msg = (
                f"optimiser step {self._num_steps} made weights that are not finite from finite"
                f" ones and a gradient norm of {grad_norm}: the device is not to be trusted"
            )
            raise RunFailed(msg)
        return True

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return what the next steps depend on beside the parameters, by name, without copies.

        `steps` [parameters + 1] has the steps of each parameter that has taken one, and last those
        of the learning-rate schedule.
        """
        tensors: dict[str, Tensor] = {}
        steps = []
        for number, (parameter, master) in enumerate(
            zip(self._parameters, self._masters, strict=True)
        ):
            if master is not parameter:
                tensors[f"{number:06d}.master"] = master.detach()
            moments = self._adam.state[master]
            steps.append(float(moments["step"]) if moments else 0.0)
            for name in _MOMENTS if moments else ():
                tensors[f"{number:06d}.{name}"] = moments[name]
        return {"steps": torch.tensor([*steps, float(self._num_steps)]), **tensors}

    def restore(self, read: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Take on a saved state; the parameters have theirs already.

        Args:
            read: fills named tensors with what `state` returned under these names.
        """
        steps = torch.zeros(len(self._parameters) + 1)
        read({"steps": steps})
        self._num_steps = int(steps[-1])
        for master, taken in zip(self._masters, steps.tolist(), strict=False):
            if taken:
                self._adam.state[master] = {
                    "step": torch.tensor(taken, device=master.device),
                    **{name: torch.zeros_like(master) for name in _MOMENTS},
                }
        read({name: tensor for name, tensor in self.state().items() if name != "steps"})
        self._largest_weight = self._measure_weights()

    def _stays_finite(self, lr: float) -> bool:
        largest = self._largest_weight
        move = lr * (self._weight_decay * largest + self._max_grad_norm / ADAM_EPSILON)
        limit = min((torch.finfo(p.dtype).max for p in self._parameters), default=math.inf)
        return largest + move < limit  # False for NaN

    def _measure_weights(self) -> float:
        with torch.no_grad():
            return _total_norm(self._parameters, math.inf).item()

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters if master.grad is not None]

    def _round_masters(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype.itemsize >= torch.float32.itemsize:
        return parameter
    return nn.Parameter(parameter.detach().float())


def _total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    norm = get_total_norm(tensors, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
