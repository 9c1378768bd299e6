"""Checks what ``make dist`` has built, by its content and in a fresh environment.

    python .ci/check_dist.py dist

The wheel holds no C sources and works where nothing but its dependencies is installed. The sdist
holds every file of the repository, so that the tests can be run from it.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A private training in a dozen lines, and the command. All compiled parts must be there.
SMOKE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import zetaclip
from zetaclip.gradients import products, rows
from zetaclip.randomness import _compiled

assert all((rows.compiled, products.compiled, _compiled)), "built without the C parts"
data = TensorDataset(torch.randn(200, 4), torch.randint(0, 2, (200,)))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
engine = zetaclip.PrivacyEngine(accountant="rdp")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=20),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    sample_rate=0.1,
    num_examples=200,
)
for inputs, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
epsilon = engine.get_epsilon(1e-5)
assert 0 < epsilon < 20, epsilon
print(f"trained from {zetaclip.__file__}, epsilon = {epsilon:.2f}")
"""


def one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    assert len(found) == 1, f"{pattern}: {found}"
    return found[0]


def check_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = [name for name in names if name.endswith((".c", ".h"))]
    assert not sources, f"C sources in the wheel: {sources}"
    package = ROOT / "src"
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package).as_posix()
        wanted = path.is_file() and name.startswith("zetaclip/") and "__pycache__" not in name
        if wanted and path.suffix not in (".c", ".h", ".so"):
            assert name in names, f"{name} is not in the wheel"
    for source in package.rglob("*.c"):
        module = source.relative_to(package).with_suffix("").as_posix()
        assert any(name.startswith(f"{module}.") and name.endswith(".so") for name in names), module


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    missing = [name for name in listed if name not in names and (ROOT / name).exists()]
    assert not missing, f"not in the sdist: {missing}"
    assert not [name for name in names if name.endswith((".so", ".private"))]


def check_installed(wheel: Path) -> None:
    """In an environment of its own.

    torch comes first and by its exact version: see the Makefile.
    """
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    torch = next(line for line in pinned if line.startswith("torch=="))
    with tempfile.TemporaryDirectory(prefix="zetaclip-dist-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        clean = {"cwd": folder, "check": True}
        subprocess.run([*pip, torch], **clean)
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], **clean)
        subprocess.run([str(python), "-I", "-W", "error", "-c", SMOKE], **clean)
        subprocess.run([str(python.with_name("zetaclip")), "--version"], **clean)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    wheel, sdist = one(folder, "*.whl"), one(folder, "*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    check_installed(wheel)
    print(f"{wheel.name} and {sdist.name} are fine")


if __name__ == "__main__":
    main()
