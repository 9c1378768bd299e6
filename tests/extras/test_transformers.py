"""PrivateTrainer: per-record gradients of transformers' models, and a trainer that counts
updates."""

import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip(
    "transformers", reason="the extra `transformers` is not installed"
)

from transformers import TrainerCallback  # noqa: E402

from zetaclip import PrivacyEngine, PrivacyLeakWarning, check_parity  # noqa: E402
from zetaclip.accounting import epsilon  # noqa: E402
from zetaclip.integrations.language import (  # noqa: E402
    register_rules,
    shifts_labels,
    with_positions,
)
from zetaclip.integrations.transformers import Privacy, PrivateTrainer, record_loss  # noqa: E402
from zetaclip.ledger import Event  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("own_rules"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

N, L, T, WORDS = 40, 8, 7, 19
PER_EPOCH = 5


def gpt2(**options):
    torch.manual_seed(0)
    given = {
        "vocab_size": WORDS,
        "n_positions": 16,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
    }
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**given, **dropout, **options}))


def bert(kind="BertForMaskedLM", **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=30, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=30, max_position_embeddings=16, bos_token_id=0,
        eos_token_id=0, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def small(name):
    """Further families whose positions or norms are their own."""
    common = {
        "vocab_size": WORDS,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sized = {**common, "intermediate_size": 30, "max_position_embeddings": 16}
    torch.manual_seed(0)
    if name == "electra":
        return transformers.ElectraForMaskedLM(
            transformers.ElectraConfig(**sized, embedding_size=12)
        )
    if name == "albert":
        return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sized, embedding_size=12))
    if name == "gpt_neo":
        kinds = [[["global", "local"], 1]]
        neo = {
            "vocab_size": WORDS,
            "hidden_size": 24,
            "num_layers": 2,
            "num_heads": 2,
            "max_position_embeddings": 16,
        }
        return transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(**neo, attention_types=kinds)
        )
    if name == "openai-gpt":
        sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2}
        return transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**sizes))
    heads = {"num_key_value_heads": 1, "head_dim": 12}
    if name == "gemma":
        return transformers.GemmaForCausalLM(transformers.GemmaConfig(**sized, **heads))
    assert name == "qwen2"
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sized, num_key_value_heads=1))


def rows(size=N, length=T, seed=1):
    """Texts of different lengths, padded, with labels that don't count on the padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (size, length), generator=generator)
    lengths = torch.randint(3, length + 1, (size,), generator=generator)
    mask = torch.arange(length) < lengths.unsqueeze(1)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": torch.where(mask, ids, -100),
    }


def dataset(size=N, **options):
    batch = rows(size, **options)
    return [{name: value[i] for name, value in batch.items()} for i in range(size)]


def parity(model, batch, loss=record_loss):
    register_rules(model)
    return check_parity(model, with_positions(model, batch), loss)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, bert, llama])
def test_parity(make):
    model = make()
    found = parity(model, rows(6))
    assert found, f"\n{found}"
    slow = {layer.parameter for layer in found.layers if "per example" in layer.path}
    # BERT's head holds a bias of its own beside its layers, so the head is one unit, with the tied
    # table in it.
    assert all(make is bert and ("cls." in name or "word_embeddings" in name) for name in slow)
    paths = {layer.parameter: layer.path for layer in found.layers}
    if make is gpt2:
        assert (
            paths["transformer.wte.weight"] == "embedding, linear"
        )  # tied: one gradient, both uses
        assert paths["transformer.h.0.attn.c_attn.weight"] == "linear"
    if make is llama:
        assert paths["model.norm.weight"] == "rms norm"


@pytest.mark.parametrize("name", ["albert", "electra", "gpt_neo", "openai-gpt", "gemma", "qwen2"])
def test_parity_of_further_families(name):
    model = small(name)
    found = parity(model, rows(6))
    assert found, f"\n{found}"
    assert_mean_of_own_losses(model)


def test_parity_of_classifiers():
    batch = {**rows(6), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    assert parity(bert("BertForSequenceClassification", num_labels=3), batch)
    tokens = {**rows(6)}
    tokens["labels"] = torch.where(tokens["labels"] >= 0, tokens["labels"] % 3, -100)
    assert parity(bert("BertForTokenClassification", num_labels=3), tokens)


def test_the_models_own_loss_mixes_records_and_is_found_out():
    model = gpt2()
    found = parity(model, rows(6), lambda m, batch: m(**batch).loss)
    assert not found
    with pytest.raises(RuntimeError, match="one record must be one row"):
        check_parity(
            model, rows(6), lambda m, batch: m(**batch).loss
        )  # the shared row of positions


@torch.no_grad()
def assert_mean_of_own_losses(model):
    """Against the model's own loss, one record at a time."""
    model.eval()
    batch = rows(6)
    each = [
        model(**{name: value[i : i + 1] for name, value in batch.items()}).loss for i in range(6)
    ]
    assert torch.allclose(record_loss(model, batch), torch.stack(each).mean(), atol=1e-6)


@pytest.mark.parametrize("make", [gpt2, bert, llama])
def test_record_loss_is_the_mean_of_single_losses(make):
    assert_mean_of_own_losses(make())
    assert shifts_labels(make()) == (make is not bert)


def test_label_smoothing_is_transformers_own():
    from transformers.trainer_pt_utils import LabelSmoother

    model, batch = gpt2().eval(), rows(1)
    own = LabelSmoother(epsilon=0.2)(model(**batch), batch["labels"].clone(), shift_labels=True)
    assert torch.allclose(record_loss(model, batch, 0.2), own, atol=1e-6)


def test_a_record_without_labels_counts_nothing():
    model, batch = gpt2(), rows(4)
    batch["labels"][2] = -100
    assert parity(model, batch)
    three = {name: value[[0, 1, 3]] for name, value in batch.items()}
    assert torch.allclose(record_loss(model, batch) * 4, record_loss(model, three) * 3, atol=1e-6)


def test_rules_are_for_norms_that_are_what_they_seem():
    from zetaclip.integrations.language import _is_rms_norm

    class OddRMSNorm(nn.Module):
        __module__ = "transformers.models.odd"

        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.full((4,), 0.5)), 1e-6

        def forward(self, x):
            return (
                self.weight.square() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            )

    assert not _is_rms_norm(OddRMSNorm())
    assert _is_rms_norm(llama().model.norm)


def test_losses_that_are_not_known():
    with pytest.raises(ValueError, match="hold no labels; override compute_loss"):
        record_loss(gpt2(), {"input_ids": torch.ones(2, 3, dtype=torch.long)})
    with pytest.raises(ValueError, match="do not fit labels"):
        record_loss(gpt2(), {**rows(2), "labels": torch.ones(2, 4, dtype=torch.long)})


# -- padding ---------------------------------------------------------------------------------------


def padded(texts, side):
    """Each batch padded to its longest text, as transformers' collators do."""
    length = max(map(len, texts))
    batch = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {name: torch.full((len(texts), length), value) for name, value in batch.items()}
    for i, text in enumerate(texts):
        own = slice(length - len(text), length) if side == "left" else slice(0, len(text))
        batch["input_ids"][i, own] = batch["labels"][i, own] = text
        batch["attention_mask"][i, own] = 1
    return batch


def texts(lengths, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, WORDS, (n,), generator=generator) for n in lengths]


def roberta():
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=30, pad_token_id=0, max_position_embeddings=20, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return transformers.RobertaForMaskedLM(config)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_one_long_record_moves_the_sum_by_no_more_than_the_sensitivity(make, side):
    short, (long,) = [texts([5])[0]] * 8, texts([15], seed=5)

    def release(rows):
        model = make()
        register_rules(model)
        before, engine = flat(model), PrivacyEngine(accountant="rdp", seed=0)
        loader = torch.utils.data.DataLoader(
            rows, batch_size=8, collate_fn=lambda rows: padded(rows, side)
        )
        _, optimizer, private = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=loader,
            noise_multiplier=0.0, clipping=0.5, sample_rate=1.0, num_examples=8,
        )  # fmt: skip
        for batch in private:
            optimizer.zero_grad()
            record_loss(model, batch).backward()
            optimizer.step()
        return (before - flat(model)) * 8, next(iter(engine.ledger.rows())).clip

    one, clip = release(short)
    # The loader can't know what becomes of the padding.
    with (
        pytest.warns(PrivacyLeakWarning, match="padded to its longest"),
        pytest.warns(UserWarning, match="num_examples = 8 was declared"),
    ):
        other, _ = release([*short, long])
    assert float((one - other).norm()) == pytest.approx(clip, rel=1e-3)  # the long one's own part


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "bert",
        "llama",
        "roberta",
        "albert",
        "electra",
        "gpt_neo",
        "openai-gpt",
        "gemma",
        "qwen2",
    ],
)
def test_a_record_does_not_see_its_padding(name, side):
    own = {"gpt2": gpt2, "bert": bert, "llama": llama, "roberta": roberta}
    model = (own[name]() if name in own else small(name)).eval()
    register_rules(model)
    assert check_parity(
        model, texts([4, 11, 6, 3]), record_loss, collate_fn=lambda rows: padded(rows, side)
    )


def test_labels_on_padding_do_not_count():
    model, batch = gpt2().eval(), padded(texts([4, 9]), "right")
    marked = {**batch, "labels": batch["input_ids"].clone()}  # the padding token as a label
    assert torch.equal(record_loss(model, marked), record_loss(model, batch))


def test_padding_on_the_left_is_refused_where_positions_can_not_be_told():
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=24, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(
        ValueError, match=r"padded on the left, and BloomForCausalLM takes no position_ids.*'right'"
    ):
        record_loss(model, padded(texts([4, 9]), "left"))
    record_loss(model, padded(texts([4, 9]), "right"))


class Uneven(PrivateTrainer):
    """Texts of different lengths, padded to the longest of each batch."""

    side = "right"

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        loader.collate_fn.collate = lambda rows: padded(
            [row["input_ids"] for row in rows], self.side
        )
        return loader


class Blind(Uneven):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs["input_ids"]).logits.square().mean()  # over padding as well


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_trainer_finds_out_whether_padding_matters(tmp_path, side):
    rows = [{"input_ids": text} for text in texts([3 + i % 9 for i in range(N)])]
    args = arguments(tmp_path, max_steps=4, remove_unused_columns=False)
    for kind in (Uneven, Blind):
        made = kind(llama(), args, train_dataset=rows, privacy=privacy())
        made.side = side
        if kind is Blind:
            with pytest.warns(PrivacyLeakWarning, match="padded to its longest"):
                made.train()
        else:
            made.train()  # warnings are errors here
        assert made.engine.updates == 4 and made.model.training


# -- training --------------------------------------------------------------------------------------


def privacy(**terms):
    given = {
        "noise_multiplier": 1.0,
        "target_delta": 1e-5,
        "clipping": 1.0,
        "accountant": "rdp",
        "seed": 0,
    }
    return Privacy(**{**given, "num_examples": N, **terms})


def arguments(tmp_path, **options):
    given = {
        "per_device_train_batch_size": L,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
    }
    given |= {
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(
        str(tmp_path), **{**given, "lr_scheduler_type": "linear", **options}
    )


def trainer(tmp_path, model, terms=None, data=None, **options):
    given = {"train_dataset": dataset() if data is None else data, "privacy": terms or privacy()}
    return PrivateTrainer(model, arguments(tmp_path, **options), **given)


def test_half_precision_rounds_no_gradient_by_the_number_of_records(tmp_path):
    """Nothing is warned of (here every warning is an error) and nothing noted: the mean is undone
    before gradients are rounded."""
    made = trainer(tmp_path, gpt2(), bf16=True)
    made.train()
    assert made.engine.updates == 2 * PER_EPOCH and not any(
        "half" in n for n in made.engine.ledger.header.notes
    )
    assert made.engine._private().settings.loss_reduction == "sum"
    assert not any(
        "samples_per_second" in name for line in made.state.log_history for name in line
    )  # it tells the exact N
    labelled = [{**row, "labels": torch.tensor(i % 3)} for i, row in enumerate(dataset())]
    for rows_out, refused in ((None, True), (256, False)):
        model = bert("BertForSequenceClassification", num_labels=3).bfloat16()
        made = trainer(tmp_path, model, privacy(physical_batch_size=rows_out), data=labelled)
        if refused:
            with pytest.raises(ValueError, match=r"bfloat16.*physical_batch_size=256"):
                made.train()
        else:
            made.train()
            assert made.engine.updates == 2 * PER_EPOCH


def test_records_without_a_label_change_no_other_record_s_weight():
    """The model's own loss divides by the records that have one: with one more, each of the others
    would count less."""
    model = bert("BertForSequenceClassification", num_labels=3)
    batch = {**rows(6), "labels": torch.tensor([0, -100, 2, -100, 1, -100])}
    own = lambda model, batch: model(**batch).loss  # noqa: E731
    assert not parity(model, batch, own)
    with pytest.raises(ValueError, match=r"-100.*Take such records out"):
        record_loss(model, batch)
    with pytest.raises(ValueError, match=r"shape \(6, 2, 2\).*override compute_loss"):
        record_loss(model, {**batch, "labels": torch.zeros(6, 2, 2, dtype=torch.long)})


def test_a_search_pushes_no_secrets(tmp_path):
    made = trainer(tmp_path, gpt2())
    made.args.push_to_hub = True
    with pytest.raises(ValueError, match=r"checkpoint-N\.private"):
        made.hyperparameter_search()


def test_it_is_the_engines_own_training(tmp_path):
    """Bit for bit what the loop by hand with the same seed gives, rates and all."""
    model = gpt2()
    made = trainer(tmp_path, model, privacy(seed=5), weight_decay=0.0)
    made.train()
    by_hand, engine = gpt2(), PrivacyEngine(accountant="rdp", seed=5)
    register_rules(by_hand)
    batch = rows()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*batch.values()), batch_size=L
    )
    _, optimizer, private = engine.make_private(
        module=by_hand, optimizer=torch.optim.SGD(by_hand.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, clipping=1.0, num_examples=N,
    )  # fmt: skip
    step = 0
    for _ in range(2):
        for values in private:
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 10)
            optimizer.zero_grad()
            record_loss(by_hand, dict(zip(batch, values, strict=True))).backward()
            optimizer.step()
            step += 1
    assert torch.allclose(flat(model), flat(by_hand), atol=1e-6)
    assert made.engine.ledger.events() == engine.ledger.events() and made.state.global_step == 10


def test_the_update_has_the_right_noise(tmp_path):
    """Records without a gradient: the update is the noise. 2/3 and 3/2 of it are rejected."""

    class Still(PrivateTrainer):
        def compute_loss(self, *args, **named):
            return 0.0 * super().compute_loss(*args, **named)

    model = llama(tie_word_embeddings=False)
    before = flat(model)
    args = arguments(tmp_path, learning_rate=1.0, lr_scheduler_type="constant", max_steps=12)
    Still(
        model, args, train_dataset=dataset(), privacy=privacy(noise_multiplier=3.0, clipping=2.0)
    ).train()
    moved = (flat(model) - before) / (3.0 * 2.0 / L * 12**0.5)
    spread = float(moved.square().mean())
    limit = 4 * (2 / len(moved)) ** 0.5
    assert (
        abs(spread - 1) < limit
        and abs(spread * 4 / 9 - 1) > limit
        and abs(spread * 9 / 4 - 1) > limit
    )


def test_noise_destroys_what_is_learned(tmp_path):
    def loss_after(sigma):
        model = llama()
        trainer(
            tmp_path, model, privacy(noise_multiplier=sigma), learning_rate=1.0, num_train_epochs=10
        ).train()
        return float(record_loss(model.eval(), rows()).detach())

    start = float(record_loss(llama().eval(), rows()).detach())
    assert loss_after(0.01) < start - 0.2 and not loss_after(1000.0) < start


@pytest.mark.parametrize(
    "terms", [{}, {"physical_batch_size": 3}, {"method": "dp-sam", "clipping": None}], ids=str
)
def test_steps_epochs_and_schedulers_count_updates(tmp_path, terms):
    made = trainer(tmp_path, llama(), privacy(**terms), logging_steps=1)
    made.train()
    assert (
        made.state.global_step == made.engine.updates == 2 * PER_EPOCH and made.state.epoch == 2.0
    )
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.1 * (1 - k / 10) for k in range(10)])
    assert made.engine.ledger.steps == (20 if "method" in terms else 10)


def test_physical_batches_change_nothing_but_memory(tmp_path):
    whole, split = llama(), llama()
    trainer(tmp_path, whole, privacy(seed=2)).train()
    trainer(tmp_path, split, privacy(seed=2, physical_batch_size=3)).train()
    assert torch.allclose(flat(whole), flat(split), atol=1e-5)


def test_target_epsilon_is_for_the_trainers_own_steps(tmp_path):
    made = trainer(
        tmp_path, llama(), privacy(noise_multiplier=None, target_epsilon=3.0), max_steps=7
    )
    made.train()
    assert made.engine.updates == 7 and 2.9 < made.engine.get_epsilon(1e-5) <= 3.0


def test_the_declared_size_decides_what_an_epoch_is(tmp_path):
    made = trainer(tmp_path, llama(), privacy(num_examples=80))
    with pytest.warns(UserWarning, match="num_examples = 80 was declared"):
        made.train()
    assert made.state.global_step == 20 and made.engine.ledger.header.expected_batch_size == L


def test_max_epsilon_ends_training_before_it_is_exceeded(tmp_path):
    made = trainer(tmp_path, llama(), privacy(max_epsilon=5.0), num_train_epochs=20)
    made.train()
    events = made.engine.ledger.events()
    more = [*events, *made.engine.planned_events(made.engine.updates, made.engine.updates + 1)]
    assert 0 < made.engine.updates == made.state.global_step < 100
    assert epsilon(events, 1e-5, "rdp") <= 5.0 < epsilon(more, 1e-5, "rdp")


def test_nothing_of_the_batches_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "zetaclip"):
        made = trainer(tmp_path, llama())
    assert "max_grad_norm=1 is ignored" in caplog.text
    output = made.train()
    names = {name for entry in made.state.log_history for name in entry}
    assert {"epsilon", "clip", "learning_rate"} <= names
    assert not names & {"loss", "grad_norm", "train_loss", "total_flos"}
    assert output.training_loss != output.training_loss and "train_loss" not in output.metrics
    last = [entry for entry in made.state.log_history if "epsilon" in entry][-1]
    assert last["epsilon"] == made.engine.get_epsilon(1e-5)


def test_diagnostics_are_logged_on_request_and_noted(tmp_path):
    made = trainer(tmp_path, llama(), privacy(non_private_diagnostics=True))
    output = made.train()
    names = {name for entry in made.state.log_history for name in entry}
    assert {"loss", "grad_norm"} <= names and output.training_loss > 0
    assert any("not covered: training losses" in note for note in made.engine.ledger.header.notes)


def test_evaluation_inside_training(tmp_path):
    model = bert()
    args = arguments(tmp_path, eval_strategy="epoch")
    made = PrivateTrainer(
        model, args, train_dataset=dataset(), eval_dataset=dataset(10, seed=3), privacy=privacy()
    )
    made.train()
    logged = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(logged) == 2
    held = rows(10, seed=3)
    assert made.evaluate()["eval_loss"] == pytest.approx(
        float(record_loss(model.eval(), held).detach()), abs=1e-5
    )


def test_the_users_arguments_are_left_alone(tmp_path):
    args = arguments(tmp_path)
    PrivateTrainer(llama(), args, train_dataset=dataset(), privacy=privacy())
    assert args.max_grad_norm == 1.0


@pytest.mark.parametrize("seed", [None, 5])
def test_a_second_train_goes_on_in_the_same_ledger(tmp_path, seed):
    made = trainer(tmp_path, llama(), privacy(seed=seed))
    made.train()
    made.train()
    assert made.engine.ledger.steps == 20
    assert len({row.stream for row in made.engine.ledger.rows()}) == 2
    assert 0 < made.engine.get_epsilon(1e-5) < float("inf")


@pytest.mark.parametrize("tried", [True, False])
def test_a_compute_loss_that_adds_up_is_refused(tmp_path, monkeypatch, tried):
    """By the trial on made-up rows; and where that can't tell, by the graphs of two batches.

    A factor that equals the rows of one batch may be a constant; at other rows it is not.
    """
    from zetaclip import LossError

    class Summed(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs) * len(inputs["input_ids"])

    if not tried:
        monkeypatch.setattr("zetaclip.engine.Hooks.rehearse", lambda *_: None)
    made = Summed(llama(), arguments(tmp_path), train_dataset=dataset(), privacy=privacy())
    with pytest.raises(
        LossError,
        match="made-up records" if tried else "compute_loss return the mean over the rows",
    ):
        made.train()
    assert len(made.engine.ledger) == (0 if tried else 1)


def test_an_overridden_training_step_is_found_out(tmp_path):
    class Past(PrivateTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    with pytest.raises(RuntimeError, match="0 private updates were taken"):
        Past(llama(), arguments(tmp_path), train_dataset=dataset(), privacy=privacy()).train()


# -- LoRA ------------------------------------------------------------------------------------------


def adapted(make, **options):
    peft = pytest.importorskip("peft", reason="the extra `transformers` is not installed")
    given = {"r": 4, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(make(), peft.LoraConfig(**{**given, **options}))


@pytest.mark.parametrize(("make", "options"), [(gpt2, {"fan_in_fan_out": True}), (llama, {})])
def test_lora(tmp_path, make, options):
    model = adapted(make, **options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)  # B starts at zero, where A has no gradient
    found = parity(model, rows(6))
    assert found, f"\n{found}"
    assert all("lora" in layer.parameter for layer in found.layers)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    made = trainer(tmp_path, model)
    made.train()
    assert all(
        torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(torch.Size(line.shape).numel() for line in made.engine.describe()) == trained
    inner = model.get_base_model()
    assert (inner.get_output_embeddings().weight is inner.get_input_embeddings().weight) == (
        make is gpt2
    )


# -- checkpoints -----------------------------------------------------------------------------------

SAVED = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 0.01}


@pytest.mark.parametrize("terms", [{}, {"method": "dp-sam", "clipping": None}], ids=str)
def test_resume_is_bit_equal_with_the_private_file(tmp_path, terms):
    options = {"resid_pdrop": 0.2}
    sgd = {**SAVED, "optim": "sgd"} if terms else SAVED
    whole = gpt2(**options)
    trainer(tmp_path, whole, privacy(seed=None, **terms), **sgd).train()
    hidden = tmp_path / "checkpoint-6.private"
    assert hidden.stat().st_mode & 0o777 == 0o600
    secret = next(iter(json.loads(hidden.read_text()).values()))
    for file in (tmp_path / "checkpoint-6").iterdir():
        assert secret["noise"].encode() not in file.read_bytes() and not file.name.endswith(
            ".private"
        )
    torch.manual_seed(99)
    again = gpt2(**options)
    made = trainer(tmp_path, again, privacy(seed=None, **terms), **{**sgd, "save_strategy": "no"})
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert torch.equal(flat(whole), flat(again))
    assert made.state.global_step == 10 and made.state.epoch == 2.0
    assert made.engine.ledger.steps == (20 if terms else 10)


def test_resume_is_bit_equal_where_older_checkpoints_were_removed(tmp_path):
    """The run's home lies beside the checkpoints, so that the trainer does not remove it; another
    trainer saves elsewhere."""
    whole = llama()
    limited = {**SAVED, "save_total_limit": 1}
    trainer(tmp_path / "first", whole, privacy(seed=None), **limited).train()
    assert [p.name for p in (tmp_path / "first").glob("checkpoint-*/")] == ["checkpoint-10"]
    kept = {**SAVED, "save_total_limit": 2}
    trainer(tmp_path / "second", llama(), privacy(seed=None), **kept).train()
    again = llama()
    made = trainer(tmp_path / "third", again, privacy(seed=None), **limited)
    made.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-9"))
    other = llama()
    made = trainer(
        tmp_path / "fourth", other, privacy(seed=None), **{**SAVED, "save_strategy": "no"}
    )
    made.train(resume_from_checkpoint=str(tmp_path / "third" / "checkpoint-10"))
    assert torch.equal(flat(again), flat(other)) and made.engine.ledger.steps == 10


def test_resume_without_the_private_file_is_rekeyed_and_said(tmp_path):
    whole = llama()
    trainer(tmp_path, whole, privacy(seed=None), **SAVED).train()
    (tmp_path / "checkpoint-6.private").unlink()
    again = llama()
    made = trainer(tmp_path, again, privacy(seed=None), **{**SAVED, "save_strategy": "no"})
    with pytest.warns(UserWarning, match="continues with fresh noise"):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert not torch.equal(flat(whole), flat(again)) and made.engine.ledger.steps == 10 + 4


def test_secrets_of_removed_checkpoints_go_too(tmp_path):
    trainer(tmp_path, llama(), save_strategy="steps", save_steps=3, save_total_limit=1).train()
    assert [p.name for p in tmp_path.glob("checkpoint-*.private")] == ["checkpoint-10.private"]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2.*physical_batch_size"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy='sequential'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"fp16": True}, "fp16.*bf16"),
        ({"torch_compile": True}, "torch_compile"),
        (
            {"include_num_input_tokens_seen": "all"},
            "counts the tokens of batches whose size is private",
        ),
        (
            {"include_num_input_tokens_seen": True},
            "counts the tokens of batches whose size is private",
        ),
    ],
)
def test_arguments_that_are_refused(tmp_path, options, message):
    args = arguments(tmp_path)
    for name, value in options.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        PrivateTrainer(llama(), args, train_dataset=dataset(), privacy=privacy())


def test_a_model_is_free_after_training_broke_off(tmp_path):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            if state.global_step == 2:
                raise RuntimeError("on purpose")

    model = llama()
    broken = trainer(tmp_path, model)
    broken.add_callback(Breaks())
    with pytest.raises(RuntimeError, match="on purpose"):
        broken.train()
    assert len(broken.engine.ledger) == 2
    again = trainer(tmp_path, model)
    again.train()
    assert len(again.engine.ledger) == again.engine.updates > 2


def test_data_parallel_is_refused(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel"):
        PrivateTrainer(llama(), args, train_dataset=dataset(), privacy=privacy())


def test_a_loss_of_the_whole_batch_is_refused(tmp_path):
    def whole(outputs, labels, num_items_in_batch=None):
        return F.mse_loss(outputs.logits, outputs.logits)

    with pytest.raises(ValueError, match="compute_loss_func sees a whole batch"):
        PrivateTrainer(
            llama(),
            arguments(tmp_path),
            train_dataset=dataset(),
            privacy=privacy(),
            compute_loss_func=whole,
        )
    with pytest.raises(ValueError, match="leave loss_reduction out"):
        privacy(loss_reduction="sum")
    with pytest.raises(TypeError, match="privacy must be"):
        PrivateTrainer(
            llama(), arguments(tmp_path), train_dataset=dataset(), privacy={"clipping": 1.0}
        )


# -- checkpointing, processes, packing -------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_gradient_checkpointing_changes_no_weight(tmp_path, make):
    """Also with dropout, whose masks have to be the same when a forward runs again."""
    options = {gpt2: {"resid_pdrop": 0.2}, llama: {"attention_dropout": 0.2}}.get(make, {})
    weights, calls = [], []
    for on in (False, True):
        model, seen = make(**options), []
        layer = next(part for part in model.modules() if isinstance(part, nn.ModuleList))[0]
        layer.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        args = arguments(tmp_path / str(on))
        args.gradient_checkpointing = on
        PrivateTrainer(model, args, train_dataset=dataset(), privacy=privacy(seed=5)).train()
        weights.append(flat(model))
        calls.append(len(seen))
    assert torch.equal(*weights)
    assert calls[1] > calls[0]  # the forward did run again


def test_reentrant_checkpointing_is_refused(tmp_path):
    args = arguments(tmp_path)
    args.gradient_checkpointing = True
    args.gradient_checkpointing_kwargs = {"use_reentrant": True}
    with pytest.raises(ValueError, match="'use_reentrant': False"):
        PrivateTrainer(llama(), args, train_dataset=dataset(), privacy=privacy())


def test_several_processes_are_refused_with_the_way_to_go(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setattr(type(args), "world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"torchrun.*guides/distributed\.md"):
        PrivateTrainer(llama(), args, train_dataset=dataset(), privacy=privacy())


def test_a_collator_that_packs_is_refused_and_packed_rows_are_records(tmp_path):
    texts = [{"input_ids": list(range(1, 4 + n % 3))} for n in range(N)]
    collate = transformers.DataCollatorWithFlattening()
    made = PrivateTrainer(
        llama(),
        arguments(tmp_path / "a"),
        train_dataset=texts,
        data_collator=collate,
        privacy=privacy(),
    )
    with pytest.raises(ValueError, match=r"data collator packs.*ε protects a row"):
        made.train()
    # Packed beforehand: two texts in a row, and positions that begin again.
    ids = torch.arange(1, T).repeat(N, 2) % WORDS
    positions = torch.arange(T - 1).repeat(N, 2)
    packed = [{"input_ids": i, "labels": i, "position_ids": p} for i, p in zip(ids, positions)]
    trainer = PrivateTrainer(
        llama(), arguments(tmp_path / "b"), train_dataset=packed, privacy=privacy()
    )
    trainer.train()
    assert len(trainer.engine.ledger) == trainer.engine.updates > 0


# -- units -----------------------------------------------------------------------------------------

OWNERS = torch.arange(N) % 15  # two or three texts each


def of_units(**terms):
    return privacy(**{"units": OWNERS, "rows_per_unit": 3, "num_examples": 15, **terms})


@pytest.mark.parametrize("physical", [None, 6])
def test_a_step_of_units_adds_each_unit_clipped_once(tmp_path, physical):
    """Without noise and sampling, beside autograd on the texts of one unit at a time."""
    model, batch = gpt2(), rows()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.zeros_like(flat(model))
    for unit in OWNERS.unique():
        own = {name: value[unit == OWNERS] for name, value in batch.items()}
        found = torch.autograd.grad(record_loss(model, own), trained)
        gradient = torch.cat([g.flatten() for g in found])
        expected -= 0.1 * gradient * min(1.0, 0.3 / float(gradient.norm())) / 15
    before = flat(model)
    terms = of_units(
        noise_multiplier=0.0, sample_rate=1.0, clipping=0.3, physical_batch_size=physical
    )
    options = {"max_steps": 1, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    trainer(tmp_path, model, terms, **options).train()
    assert (flat(model) - before - expected).norm() <= 1e-4 * expected.norm()


def test_epsilon_is_for_one_unit_and_steps_count_batches_of_units(tmp_path):
    made = trainer(tmp_path, gpt2(), of_units())
    made.train()
    assert made.state.global_step == made.engine.updates == 2 * 2  # ceil(15 / 8) in an epoch
    assert made.engine.get_epsilon(1e-5) == epsilon(
        [Event(L / 15, 1.0, 4)], 1e-5, made.engine.accountant
    )
    assert "unit" in made.engine.ledger.header.adjacency


def test_a_resumed_run_has_the_same_units(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}
    whole = gpt2()
    trainer(tmp_path, whole, of_units(), **options).train()
    other = trainer(tmp_path, gpt2(), of_units(units=OWNERS.roll(1)), **options)
    with pytest.raises(ValueError, match="data"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = gpt2()
    made = trainer(tmp_path, again, of_units(), **options)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert made.engine.updates == 4 and torch.equal(flat(again), flat(whole))
