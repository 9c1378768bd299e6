"""The model card: what Hugging Face reads in it, and what it says about privacy."""

import json
import re

import pytest
from made_up import settings

import zetaclip
from zetaclip.training import Config, train


def header(text):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.S).group(1))


def test_hugging_face_reads_it(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    train(Config(data="digits", model="mlp-2", method="dp-sgd", sigma=1.0, steps=3), tmp_path / "r")
    card = hub.ModelCard.load(tmp_path / "r" / "MODEL_CARD.md")
    assert card.data.library_name == "zetaclip" and "differential-privacy" in card.data.tags
    assert card.data.pipeline_tag == "image-classification" and card.data.model_name == "digits"
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    found = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert found["accuracy"] == result["metrics"]["accuracy"] and "ece" in found
    assert card.data.eval_results[0].dataset_name == "digits"


def test_it_says_what_was_spent_and_what_is_not_covered(table_run):
    card = zetaclip.load_run(table_run[0]).card
    result = json.loads((table_run[0] / "result.json").read_text())
    for said in (
        f"| ε | {result['epsilon']:.4g} |",
        "| δ |",
        "| adjacency | add/remove one record |",
        "| unit | one row |",
        "300 (declared)",
        "### Not covered",
        "The seed of the noise is known",
        "| age | numeric | 18.0 to 95.0 |",
        "| ward | categorical | `A`, `B`, `C` |",
        "Nothing was measured",
        "zetaclip.load_run",
    ):
        assert said in card, said
    assert "| name |" not in card  # a column that is not used
    assert header(card)["pipeline_tag"] == "tabular-classification" and "model-index" not in card


def test_names_with_strange_characters_stay_readable(table_run, tmp_path):
    data = tmp_path / 'a "b": [c] #d.csv'
    data.write_text(table_run[1].read_text())
    train(
        settings(data, steps=2, no_eval=False, data_options={}, num_examples=None), tmp_path / "r"
    )
    (one,) = header(zetaclip.load_run(tmp_path / "r").card)["model-index"]
    assert one["name"] == data.name and one["results"][0]["metrics"][0]["type"] == "auc"


def test_without_privacy_nothing_is_claimed(tmp_path):
    train(Config(data="digits", model="mlp-2", method="sgd", steps=3), tmp_path / "r")
    run = zetaclip.load_run(tmp_path / "r")
    assert run.epsilon is None and "**No ε is claimed** for this model" in run.card
    assert "### Covered\n\nNothing." in run.card and "no ε is claimed" in repr(run)


def test_a_model_of_text_is_found_as_one(tmp_path):
    rows = [{"body": "a good day" if i % 2 else "one bad box", "y": "np"[i % 2]} for i in range(60)]
    (tmp_path / "s.json").write_text(
        json.dumps(
            {
                "target": "y",
                "classes": ["n", "p"],
                "columns": {"body": {"type": "text", "buckets": 32}},
            }
        )
    )
    config = Config(
        schema=str(tmp_path / "s.json"), method="dp-sgd", sigma=1.0, steps=2, no_eval=True
    )
    train(config, tmp_path / "r", data=rows)
    run = zetaclip.load_run(tmp_path / "r")
    assert header(run.card)["pipeline_tag"] == "text-classification"
    assert run.predict({"body": ["a good day", ""]}).shape == (2,)
