"""What must be there before SGLang is imported. Importing this module costs next to nothing."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class _Kernel:
    """A name in `sgl_kernel`. It has any name itself, as some are namespaces, and raises when called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "_Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(f"{self.__name__} is a stand-in: no kernels on a CPU")


class _Kernels(importlib.abc.Loader):
    """`sgl_kernel` and all modules in it: any name can be imported from them."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _Kernel(module.__name__).__getattr__  # type: ignore[method-assign]  # PEP 562


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `sgl_kernel`, and defines two operators before torchvision is found.

    torchvision's wheels for CUDA cannot load their library beside a CPU torch, yet refer to its operators.
    """

    torchvision = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, _Kernels(), is_package=True)
        if fullname == "torchvision" and not self.torchvision:
            self.torchvision = True
            import torch

            for name in ("nms", "qnms"):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", signature)
        return None


def install() -> None:
    """Put the finder first. The .pth file may be read more than once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
