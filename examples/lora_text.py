"""Private LoRA on a small causal model; the private text is this repository's documentation.

    pip install 'zetaclip[transformers]'
    python examples/lora_text.py            # about two minutes on one core

A byte-level Llama is first trained without privacy on the package's source code, which plays the
role of public text. Then adapters are trained with ε = 8 on passages of the documentation; one
passage is one record. With the adapters, the loss on held-out passages is lower.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 64  # bytes of a passage
DELTA = 1e-4


def passages(files: list[Path]) -> Tensor:
    """The files' bytes, cut into rows."""
    data = b"\n".join(file.read_bytes() for file in sorted(files))
    usable = len(data) // LENGTH * LENGTH
    return torch.frombuffer(bytearray(data[:usable]), dtype=torch.uint8).long().view(-1, LENGTH)


def rows(ids: Tensor) -> list[dict[str, Tensor]]:
    """The passages as records of a trainer."""
    return [{"input_ids": row, "labels": row} for row in ids]


def public_model(ids: Tensor, steps: int):  # type: ignore[no-untyped-def]
    """A small Llama, trained without privacy on public text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = ids[torch.randint(len(ids), (32,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model


def main() -> None:
    """Trains the adapters and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public-steps", type=int, default=400)
    parser.add_argument("--epochs", type=float, default=15)
    parser.add_argument("--epsilon", type=float, default=8.0)
    arguments = parser.parse_args()

    try:
        from peft import LoraConfig, get_peft_model
        from transformers import TrainingArguments
    except ImportError:
        raise SystemExit(
            "this example needs transformers and PEFT: pip install 'zetaclip[transformers]'"
        ) from None

    from zetaclip.integrations.transformers import Privacy, PrivateTrainer

    base = public_model(passages(list((ROOT / "src").rglob("*.py"))), arguments.public_steps)
    private = passages([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
    private = private[torch.randperm(len(private), generator=torch.Generator().manual_seed(1))]
    held, train = private[:200], private[200:]

    everywhere = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules=everywhere, task_type="CAUSAL_LM")
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model,
            TrainingArguments(
                folder,
                per_device_train_batch_size=128,
                num_train_epochs=arguments.epochs,
                learning_rate=2e-3,
                optim="adamw_torch",
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=50,
            ),
            train_dataset=rows(train),
            eval_dataset=rows(held),
            privacy=Privacy(
                target_epsilon=arguments.epsilon,
                target_delta=DELTA,
                clipping=1.0,
                num_examples=len(train) // 100 * 100,  # a round, public number
                accountant="pld",
            ),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    assert trainer.engine is not None
    epsilon = trainer.engine.get_epsilon(DELTA)
    updates = trainer.engine.updates
    print(f"{len(train)} passages, {updates} updates, ε = {epsilon:.2f} at δ = {DELTA:g}")
    print(f"loss on {len(held)} held-out passages: {before:.3f} before, {after:.3f} after training")


if __name__ == "__main__":
    main()
