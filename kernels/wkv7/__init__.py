"""Computes WKV-7, RWKV-7's operator: a matrix state decays, forgets along one direction, and adds v k^T.

For each batch row and head, the state S is an N x N matrix, with rows i for the value and columns j for the key. The inputs of
a step are vectors of N numbers. With w = exp(log_w), a step is

    sa_i = sum_j S_ij a_j        S_ij <- S_ij w_j + sa_i b_j + v_i k_j        y_i = sum_j S_ij r_j         (y reads the new S)

r, log_w, k, v, a, b and y are (B,T,H,N). The state is (B,H,N,N), initially zero. T and N may have any size. In RWKV-7,
-0.6066 <= log_w <= 0, a = -kk and b = kk * rate, where kk is normalised. Implementations may assume -1 <= log_w <= 0. If an
input of a step is NaN, y and the state of that head are NaN from that step on. But a NaN in v affects only the same row i, and
a NaN in r affects only y of that step. The bits of y at earlier steps do not change.
Source: the RWKV-7 paper (arXiv 2503.14456), section 4; RWKV-LM, RWKV-v7/rwkv_v7_demo.py.

An implementation is a file in this folder with REQUIRES, forward(r, log_w, k, v, a, b, state, *activations) -> (y, state) and
backward(r, log_w, k, v, a, b, state, *activations, grad_y, grad_state) -> the gradients of the first seven arguments. The
activations are uninitialised tensors that forward fills for backward. Without a gradient there are no activations. The file's
optional function activation_shapes(B, T, H, N) returns the shapes of the activations. Their dtype is float32, or float64 for
float64 inputs. All tensors are contiguous. If REQUIRES contains bfloat16, r, k, v, a, b, y and grad_y may be bfloat16, and the
gradients of r, k, v, a, b have the same dtype. All other tensors are float32. `step` below computes single steps for every
implementation.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.operator import Operator, Tensors, contiguous, contiguous_like

SEQUENCES = 6                    # r, log_w, k, v, a, b
LOG_W = 1                        # the index of log_w among the inputs


class WKV7(Operator):
    """Computes WKV-7 by the named implementation: `WKV7("reference")(r, log_w, k, v, a, b, state=None) -> (y, state)`.

    The result can be differentiated once, with respect to all seven inputs. B, T, H and N may have any size, including 0.
    log_w must be from -1 to 0: some kernels divide by the product of 16 decays, and with log_w below -5 their results are NaN.
    Half-precision r, k, v, a, b are computed in float32, and y has the dtype of v. log_w is converted to float32. Raises
    ValueError for an unknown name or wrong inputs, and KernelUnavailable if the implementation cannot run on the inputs'
    device.
    """

    folder = "wkv7"
    inputs = "Tensor r, Tensor log_w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state"
    outputs = (("y", "v"), ("state", "state"))
    gradients = ("r", "log_w", "k", "v", "a", "b", "state")
    differentiable = ("y", "state")
    saved = gradients

    def __call__(self, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
                 state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check((r, log_w, k, v, a, b), state)
        if state is None:
            B, _, H, N = v.shape
            state = empty_state(B, H, N, v.device, _compute_dtype(v))
        y, state = self._function(r, log_w, k, v, a, b, state)
        return y, state

    def empty_activations(self, *inputs: Tensor) -> Tensors:
        B, T, H, N = self._padded_sizes(inputs[0].shape)
        dtype = _compute_dtype(inputs[0])
        return tuple(inputs[0].new_empty(shape, dtype=dtype) for shape in self._activation_shapes(B, T, H, N))

    @property
    def n_activations(self) -> int:
        return len(self._activation_shapes(1, 1, 1, 1))

    def _activation_shapes(self, B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
        shapes: Any = getattr(self._implementation, "activation_shapes", None)
        return shapes(B, T, H, N) if shapes else ()

    def _forward(self, *inputs: Tensor) -> Tensors:
        _, T, _, N = inputs[0].shape
        supported = self._supported_inputs(inputs[:7])
        outputs = self._implementation.forward(*supported, *inputs[7:])
        y, state = self._outputs_of(outputs, (supported[3], supported[6]))
        return contiguous_like((y[:, :T, :, :N], state[..., :N, :N]), (inputs[3], inputs[6]))

    def _backward(self, *saved: Tensor) -> Tensors:
        _, T, _, N = saved[0].shape
        *inputs, grad_y, grad_state = self._supported_inputs((*saved[:7], *saved[-2:]))
        gradients = self._gradients_of(self._implementation.backward(*inputs, *saved[7:-2], grad_y, grad_state), inputs)
        cropped = *(gradient[:, :T, :, :N] for gradient in gradients[:SEQUENCES]), gradients[SEQUENCES][..., :N, :N]
        return contiguous_like(cropped, saved[:7])

    def _padded_sizes(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """Returns B, T, H, N, with T and N padded to supported sizes. The implementation rejects an N above all N_sizes."""
        B, T, H, N = shape
        N = next((size for size in self.requires.N_sizes if size >= N), N)
        return B, T + -T % self.requires.T_multiple, H, N + -N % self.requires.N_multiple

    def _supported_inputs(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Returns the tensors contiguous, in a supported dtype, and padded with zeros, which change no result."""
        shape = tensors[0].shape
        _, T, _, N = self._padded_sizes(shape)
        wide = _compute_dtype(tensors[0])
        sequence_dtypes = {tensor.dtype for i, tensor in enumerate(tensors[:SEQUENCES]) if i != LOG_W}
        narrow = sequence_dtypes.pop() if len(sequence_dtypes) == 1 else wide
        narrow = narrow if narrow in self.requires.dtypes else wide
        prepared = []
        for i, tensor in enumerate(tensors):
            is_state = i == SEQUENCES or i == SEQUENCES + 2          # state, and grad_state, which follows grad_y
            tensor = contiguous(tensor.detach(), wide if is_state or i == LOG_W else narrow)
            prepared.append(_pad_end_to(tensor, (N, N) if is_state else (T, shape[2], N)))
        return prepared

    def _check(self, sequences: tuple[Tensor, ...], state: Tensor | None) -> None:
        self._require_tensors(*sequences, *([] if state is None else [state]))
        names = self._names[:SEQUENCES]
        v = sequences[3]
        if v.dim() != 4 or any(tensor.shape != v.shape for tensor in sequences):
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, sequences, strict=True))
            raise ValueError(f"WKV7: r, log_w, k, v, a and b must have the same shape (B,T,H,N); got {shapes}")
        B, _, H, N = v.shape
        if state is not None and state.shape != (B, H, N, N):
            raise ValueError(f"WKV7: the state must have the shape (B,H,N,N) = {(B, H, N, N)}; got {tuple(state.shape)}")
        tensors = sequences if state is None else (*sequences, state)
        dtypes = [tensor.dtype for tensor in tensors]
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"WKV7: tensors must be floating-point; got {', '.join(map(str, dtypes))}")
        if any(tensor.device != v.device for tensor in tensors):
            raise ValueError(f"WKV7: all tensors and the state must be on the device of v, {v.device}: move the other tensors "
                             "to that device")
        self.check_dtype(*dtypes)
        if torch.float64 in dtypes and dtypes[0] != torch.float64:
            raise ValueError(f"WKV7 computes in float64 only if r is float64, but r is {dtypes[0]}: cast all inputs to the "
                             "same dtype")
        self.check_device(v.device)

    @staticmethod
    def step(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y and the state after one time step with inputs (B,H,N), by the same operations for every implementation."""
        dtype = v.dtype
        r, log_w, k, v, a, b = (tensor.to(state.dtype) for tensor in (r, log_w, k, v, a, b))
        sa = (state * a.unsqueeze(-2)).sum(-1, keepdim=True)               # this is faster than state @ a
        state = state * log_w.exp().unsqueeze(-2) + sa * b.unsqueeze(-2) + v.unsqueeze(-1) * k.unsqueeze(-2)
        return (state * r.unsqueeze(-2)).sum(-1).to(dtype), state


def empty_state(B: int, H: int, N: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the state (B,H,N,N) before the first token, which is zero."""
    return torch.zeros(B, H, N, N, device=device, dtype=dtype)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _pad_end_to(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    missing = [after for size, padded in zip(tensor.shape[::-1], sizes[::-1]) for after in (0, padded - size)]  # noqa: B905
    return pad(tensor, missing) if any(missing) else tensor


OPERATOR = WKV7
