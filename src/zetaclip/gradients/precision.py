"""Full float32 in kernels while norms and sums are computed, whatever the user's settings.

Whether kernels may round float32 depends on one switch for matmul and one for cudnn, and from torch
2.9 on also on a setting per kind of kernel, with inheritance. The settings are read through the
private functions behind torch.backends.*.fp32_precision, because that happens several times in
every step. ``capture.exact`` asks whether something must be changed; the change is made here.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_precision = getattr(torch._C, "_set_fp32_precision_setter", None)
ROUNDED = ("tf32", "bf16")


class WholeFloat32:
    """Kernels use full float32 inside; afterwards the user's settings are restored.

    The settings belong to the process. Of several threads the last one to leave restores them.
    This is tested on the CPU only, without a GPU that has TF32.
    """

    inside: ClassVar[int] = 0
    _entered: ClassVar[list[WholeFloat32]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, backend: str, autocast: Any) -> None:
        self.backend, self.autocast = backend, autocast

    def __enter__(self) -> None:
        with self._lock:
            self._look()
            WholeFloat32.inside += 1
            self._entered.append(self)
        try:
            with self._lock:
                self._whole()
            self.autocast.__enter__()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self.autocast.__exit__(*error)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self.inside == 1 and self._entered:
                self._entered.pop()._put_back()
            # Last: a thread that reads 0 without the lock must find the user's settings restored.
            WholeFloat32.inside -= 1

    def _look(self) -> None:
        self.matmul = _matmul_switch()
        self.cudnn = precision is None and torch.backends.cudnn.allow_tf32
        # The switch for matmul changes the settings of both backends.
        self.settings = [] if precision is None else [
            (backend, kind, precision(backend, kind))
            for backend, kind in (("cuda", "matmul"), ("mkldnn", "matmul"), (self.backend, "conv"))
        ]  # fmt: skip

    def _whole(self) -> None:
        if self.matmul is not None:
            torch.set_float32_matmul_precision("highest")
        if self.cudnn:
            torch.backends.cudnn.allow_tf32 = False
        for backend, kind, _ in self.settings:
            if backend != self.backend:
                continue
            if precision(backend, kind) in ROUNDED:  # type: ignore[misc]
                _set_precision(backend, kind, "ieee")  # type: ignore[misc]

    def _put_back(self) -> None:
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.cudnn:
            torch.backends.cudnn.allow_tf32 = True
        for backend, kind, before in self.settings:
            if precision(backend, kind) != before:  # type: ignore[misc]
                inherited = before == precision(backend, "all")  # type: ignore[misc]
                _set_precision(backend, kind, "none" if inherited else before)  # type: ignore[misc]


def _matmul_switch() -> str | None:
    """The value of the switch for matmul if it must be changed, otherwise None.

    torch raises if only a setting was changed, not the switch.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return None if before == "highest" else before
