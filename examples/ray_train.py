"""A private training loop in Ray Train: several workers train one model with one noise.

    python examples/ray_train.py                     # needs: pip install 'zetaclip[ray]'
    python examples/ray_train.py --workers=4 --folder=/shared/run

Ray restarts a worker that dies. Every worker must see the folder. The checkpoint is written there,
not into a Ray checkpoint: beside it, the engine notes every step before the step is executed. A
copy made by Ray would miss the steps executed after the copy.
"""

import sys
import tempfile
from pathlib import Path


def train_loop(config: dict) -> None:
    """Runs on every worker; Ray has initialised torch's process group."""
    import ray.train
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from zetaclip import PrivacyEngine
    from zetaclip.data import load
    from zetaclip.models import build

    data = load("digits")
    model = build("mlp-2", tuple(data.train.x.shape[1:]), data.outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=128),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=config["epochs"],
        num_examples=data.nominal_size,
        clipping=1.0,
    )

    # Every worker calls save and load. Worker 0 reads and writes, and sends what it read.
    checkpoint = Path(config["folder"]) / "run.pt"
    if checkpoint.exists():
        # The same batches and noise again; engine.load(checkpoint) would draw new ones.
        engine.load(checkpoint, replay=True)
    else:
        engine.save(checkpoint)  # before the first step, so that every step is noted
    started_at = engine.updates

    while engine.updates < config["epochs"] * len(loader):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        engine.save(checkpoint)
        metrics = {
            "updates": engine.updates,
            "started_at": started_at,
            "epsilon": engine.get_epsilon(1e-5),
        }
        metrics["releases"] = len(engine.ledger)
        with tempfile.TemporaryDirectory() as weights:  # Ray keeps the weights, which are released
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(model.state_dict(), f"{weights}/model.pt")
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(weights))
            else:
                ray.train.report(metrics)


def main(workers: int = 2, epochs: int = 5, folder: str = "") -> None:
    """Trains on several workers and prints ε."""
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError:
        raise SystemExit("this example needs Ray: pip install 'zetaclip[ray]'") from None

    folder = folder or tempfile.mkdtemp(prefix="zetaclip-ray-")
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": epochs, "folder": folder},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=3)
        ),
    )
    metrics = trainer.fit().metrics
    print(f"ε = {metrics['epsilon']:.3f} after {metrics['updates']} updates; {folder}")


if __name__ == "__main__":
    settings = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    main(
        int(settings.get("workers", 2)), int(settings.get("epochs", 5)), settings.get("folder", "")
    )
