"""Make a torchvision that was built for another torch importable in this environment.

PyPI's torchvision belongs to a CUDA torch. Beside a CPU torch its compiled operators do not
load and importing it fails, and with it transformers' image processors and vLLM. Its Python
transforms need only the operators' *schemas*. Where the import fails for this reason, and
only there, a start-up hook declares them first; torchaudio and torchcodec, which vLLM never
needs here, are removed where they cannot load either. A working installation is not touched.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK_NAME = "_torchvision_schemas"
HOOK = '''\
"""Declares the schemas of torchvision's compiled operators when torchvision is imported."""

import sys
from importlib.abc import MetaPathFinder

OPERATORS = [
    "nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward",
    "roi_pool", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d",
    "_deform_conv2d_backward",
]


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for name in OPERATORS:
                self.library.define(name + "(Tensor x) -> Tensor")
            sys.modules[__name__].finder = self  # a collected Library takes its schemas along
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
'''


def import_error(module: str) -> str:
    """The last line of what importing `module` in a new process prints, empty if it works."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]


def main() -> int:
    """Repair what is broken, say what was done; exit status 1 if torchvision still fails."""
    error = import_error("torchvision")
    if "No module named 'torchvision'" in error:
        print("torchvision is not installed; nothing to repair")
        return 0
    if "torchvision::" in error and "does not exist" in error:
        site = Path(sysconfig.get_path("purelib"))
        (site / f"{HOOK_NAME}.py").write_text(HOOK)
        (site / f"{HOOK_NAME}.pth").write_text(f"import {HOOK_NAME}\n")
        print("torchvision was built for another torch: its operators' schemas are now declared")
        error = import_error("torchvision")
    if error:
        print(f"torchvision does not import: {error}", file=sys.stderr)
        return 1
    for name in ("torchaudio", "torchcodec"):
        error = import_error(name)
        if error and "No module named" not in error:
            print(f"{name} cannot load here and nothing needs it; removing it")
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qy", name], check=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
