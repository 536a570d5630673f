"""Install the wheel in a folder with only its declared dependencies, and use it as a user would.

    python tools/try_package.py dist

In a new virtual environment it asks for a plan, runs a script on the simulated GPU and prints the
version. It also checks that the book's own libraries were not installed. It downloads PyTorch,
unless pip has it in its cache.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

SCRIPT = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OF_THE_BOOK = ("matplotlib", "ipywidgets", "datasets")


def main(folder: str) -> None:
    (wheel,) = Path(folder).glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="package-") as name:
        into = Path(name)
        venv.create(into / "env", with_pip=True)
        binaries = into / "env" / "bin"
        subprocess.run([binaries / "pip", "install", "--quiet", wheel.resolve()], check=True)
        (into / "train.py").write_text(SCRIPT)
        for command in (
            [binaries / "memlab", "plan", "--model", "gpt2", "--gpu", "T4"],
            [binaries / "memlab", "run", "train.py", "--gpu", "T4"],
            [binaries / "memlab", "--version"],
        ):
            subprocess.run(command, cwd=into, check=True)
        found = "; ".join(
            f"assert importlib.util.find_spec({name!r}) is None, {name!r}" for name in OF_THE_BOOK
        )
        subprocess.run([binaries / "python", "-c", f"import importlib.util; {found}"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
