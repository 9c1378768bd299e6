"""Hashed text: compared with scikit-learn's counts, from a column to predictions."""

import csv
import random
import zlib

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer

import zetaclip
from zetaclip.data import load
from zetaclip.data.text import Text
from zetaclip.errors import InputError
from zetaclip.training import Config, train

TEXTS = [
    "The room was clean and the staff was friendly.",
    "the ROOM was dirty, the staff was not friendly",
    "Ünïcode wörds count; a b c don't",
    "room room room room",
]


@pytest.mark.parametrize("pairs", [True, False])
def test_without_collisions_rows_are_as_similar_as_roots_of_word_counts(pairs):
    counts = CountVectorizer(ngram_range=(1, 2 if pairs else 1)).fit_transform(TEXTS).toarray()
    wanted = np.sqrt(counts)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    ours = Text("body", 2**20, pairs).encode(TEXTS).astype(np.float64)
    np.testing.assert_allclose(ours @ ours.T, wanted @ wanted.T, atol=1e-6)


def test_few_buckets_keep_similarities_on_average():
    words = [f"word{i}" for i in range(2000)]
    draw = random.Random(0)
    texts = [" ".join(draw.sample(words, 60)) for _ in range(60)]
    rows = Text("body", 512, pairs=False).encode(texts).astype(np.float64)
    exact = Text("body", 2**18, pairs=False).encode(texts).astype(np.float64)
    off = ~np.eye(60, dtype=bool)
    errors = (rows @ rows.T - exact @ exact.T)[off]
    assert abs(errors.mean()) < 0.01  # signs cancel collisions; without them the mean is positive
    assert errors.std() < 0.1


def test_the_hash_is_the_same_in_every_process_and_version():
    state = (zlib.crc32(b"room") + 0x9E3779B97F4A7C15) % 2**64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    state ^= state >> 31
    row = Text("body", 64).encode(["Room"])[0]
    assert row.nonzero()[0].tolist() == [(state >> 1) % 64]
    assert row[(state >> 1) % 64] == (-1 if state & 1 else 1)


def test_texts_without_words_are_zeros_and_the_others_have_length_1():
    rows = Text("body", 64).encode(["", "?", "a !", "two words"])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [0, 0, 0, 1], atol=1e-6)


def test_a_text_depends_on_no_other():
    whole = Text("body", 256).encode(TEXTS)
    for i, text in enumerate(TEXTS):
        assert np.array_equal(Text("body", 256).encode([text])[0], whole[i])


@pytest.mark.parametrize("buckets", [3, 2**21, 64.5, True, "many"])
def test_wrong_buckets_are_named(buckets):
    with pytest.raises(InputError, match="buckets of 'body' must be"):
        Text("body", buckets)


def test_too_many_texts_say_what_to_do():
    class Many(list):
        def __len__(self):
            return 10**7

    with pytest.raises(InputError, match=r"GiB.*declare fewer buckets for 'body'"):
        Text("body").encode(Many())


def reviews(path, count, seed=0):
    draw = random.Random(seed)
    shared = [f"word{i}" for i in range(300)]
    good, bad = ["lovely", "great", "kind", "clean"], ["awful", "dirty", "rude", "late"]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "body", "label"])
        for i in range(count):
            label = draw.choice(["good", "bad"])
            words = draw.sample(shared, 12) + draw.sample(good if label == "good" else bad, 2)
            draw.shuffle(words)
            writer.writerow([f"r{i}", " ".join(words), label])
    return path


def test_a_column_of_text_is_enough_to_train_and_predict(tmp_path):
    data = reviews(tmp_path / "reviews.csv", 1500)
    (tmp_path / "schema.toml").write_text(
        'target = "label"\nclasses = ["good", "bad"]\n[columns.id]\ntype = "ignore"\n'
        '[columns.body]\ntype = "text"\nbuckets = 512\n'
    )
    settings = {
        "data": str(data), "schema": str(tmp_path / "schema.toml"), "num_examples": 1200,
        "epsilon": 8.0, "steps": 60, "seed": 1, "threads": 1,
    }  # fmt: skip
    result = train(Config.from_mapping(settings), tmp_path / "run")
    assert result["metric"]["value"] > 0.9
    assert result["features"]["kind"] == "bins"
    run = zetaclip.load_run(tmp_path / "run")
    new = {"body": ["what a lovely and kind place", "rude people, awful food"]}
    assert run.predict(new).tolist() == ["good", "bad"]


def test_text_alone_leaves_all_other_columns_out(tmp_path):
    data = reviews(tmp_path / "reviews.csv", 50)
    with pytest.warns(zetaclip.PrivacyLeakWarning) as said:
        dataset = load(data, text="body", target="label")
    assert [column.name for column in dataset.inputs.columns] == ["body"]
    assert not any("body" in str(one.message) for one in said)  # nothing was inferred from it
    assert dataset.train.x.shape[1] == 4096
    with pytest.raises(InputError, match=r"no column 'bdy'\. Did you mean 'body'"):
        load(data, text="bdy", target="label")


def test_a_schema_and_a_text_go_together(tmp_path):
    data = reviews(tmp_path / "reviews.csv", 50)
    schema = {
        "target": "label",
        "classes": ["good", "bad"],
        "columns": {"id": {"type": "ignore"}, "body": {"type": "text", "buckets": 32}},
    }
    assert load(data, text="body", schema=schema).input_shape == (32,)
    with pytest.raises(InputError, match="buckets of 'body'"):
        load(data, schema={**schema, "columns": {"body": {"type": "text", "buckets": 1}}})
