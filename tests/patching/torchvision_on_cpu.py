"""Lets torchvision, which timm needs, be imported beside a CPU build of torch.

The wheel of torchvision on the package index asks for operators of its CUDA library and does not
import without them; transformers and torchmetrics import it where they find it, and fail with it.
Importing this module declares the operators just before torchvision is first imported. Run as a
script, it makes every process of its environment do so.
"""

import importlib.abc
import shutil
import sys
import sysconfig
from pathlib import Path


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; it only sees torchvision coming."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare():
    import torch

    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        DeclareOperators.library = library  # which would be undone with it


def install():
    folder = Path(sysconfig.get_path("purelib"))
    shutil.copy(__file__, folder / "torchvision_on_cpu.py")
    (folder / "torchvision_on_cpu.pth").write_text("import torchvision_on_cpu\n")


if __name__ == "__main__":
    install()
elif __name__ == "torchvision_on_cpu" or "torchvision_on_cpu" not in sys.modules:
    sys.meta_path.insert(0, DeclareOperators())
