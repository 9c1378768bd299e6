"""The ledger: what composes with what, what is refused, and that it survives a trip to the disk."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zetaclip.errors import LedgerError
from zetaclip.ledger import Event, Header, Ledger, Row

HEADER = Header(
    num_examples=60000,
    num_examples_source="declared",
    expected_batch_size=256.0,
    accountant="prv",
    method="DP-SGD",
    notes=("σ from a schedule",),
)


def row(batch: int, noise: float = 1.1, query: str = "gradient", **other: object) -> Row:
    plain = Row(batch, batch, query, 2.0, noise, 2.0 * noise, 0.01, "a", 2.0, 0.0)
    return replace(plain, **other)  # type: ignore[arg-type]


def ledger_of(*rows: Row) -> Ledger:
    ledger = Ledger(HEADER)
    for each in rows:
        ledger.append(each)
    return ledger


def by_hand(rows: list[Row]) -> dict[tuple[float, float], int]:
    """Effective multipliers and their counts, the slow and obvious way."""
    batches: dict[tuple[str, int], list[Row]] = {}
    for each in rows:
        batches.setdefault((each.stream, each.batch), []).append(each)
    counts: dict[tuple[float, float], int] = {}
    for group in batches.values():
        noises = [each.noise_multiplier for each in group]
        effective = 0.0 if 0.0 in noises else math.fsum(noise**-2 for noise in noises) ** -0.5
        key = (group[0].sample_rate, float(f"{effective:.6g}"))
        counts[key] = counts.get(key, 0) + 1
    return counts


def test_equal_steps_are_counted() -> None:
    ledger = ledger_of(
        *[row(batch) for batch in range(7)], *[row(batch, 0.8) for batch in range(7, 10)]
    )
    assert ledger.events() == [Event(0.01, 0.8, 3), Event(0.01, 1.1, 7)]
    assert ledger.steps == 10 and len(ledger) == 10


def test_no_rows_no_events() -> None:
    assert ledger_of().events() == [] and ledger_of().steps == 0 and list(ledger_of().rows()) == []


def test_rows_of_one_batch_are_one_gaussian() -> None:
    ledger = ledger_of(row(0, 0.9), row(0, 1.3, "norms"), row(1, 3.0), row(1, 4.0, "norms"))
    first, second = ledger.events()
    assert first.noise_multiplier == pytest.approx(1 / math.sqrt(1 / 0.81 + 1 / 1.69), rel=1e-11)
    assert second.noise_multiplier == pytest.approx(2.4, rel=1e-11)  # 3-4-5 triangle
    assert ledger.steps == 2


def test_the_same_batch_number_of_another_stream_is_another_batch() -> None:
    assert ledger_of(row(0), row(0, stream="b")).events() == [Event(0.01, 1.1, 2)]


def test_order_does_not_matter() -> None:
    rows = [
        row(batch, noise, query) for batch in range(5) for query, noise in (("g", 0.7), ("n", 3.3))
    ]
    scattered = rows[::2] + rows[1::2][::-1]
    assert ledger_of(*scattered).events() == ledger_of(*rows).events()
    assert ledger_of(*scattered).steps == 5
    assert ledger_of(*rows).events()[0].count == 5


def test_no_noise_in_one_query_is_no_noise() -> None:
    assert ledger_of(row(0, 1.0), row(0, 0.0, "norms")).events() == [Event(0.01, 0.0, 1)]
    assert ledger_of(row(0, 0.0)).events() == [Event(0.01, 0.0, 1)]


def test_a_moving_clipping_norm_does_not_split_equal_steps() -> None:
    ledger = Ledger(HEADER)
    for batch in range(200):
        sensitivity = 0.1 + 0.037 * batch
        std = 1.1 * sensitivity
        ledger.append(
            row(batch, std / sensitivity, sensitivity=sensitivity, noise_std=std, clip=sensitivity)
        )
    assert len({each.noise_multiplier for each in ledger.rows()}) > 1  # the quotient does move
    assert ledger.events() == [Event(0.01, 1.1, 200)]


def test_close_but_different_multipliers_stay_apart() -> None:
    assert len(ledger_of(row(0, 1.1), row(1, 1.1 + 1e-9)).events()) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 4),
            st.sampled_from(["gradient", "norms", "count"]),
            st.sampled_from([0.0, 0.5, 1.1, 7.0]),
        ),
        max_size=25,
    )
)
def test_events_agree_with_the_obvious_computation(
    drawn: list[tuple[str, int, str, float]],
) -> None:
    unique = {(stream, batch, query): noise for stream, batch, query, noise in drawn}
    rows = [row(b, noise, query, stream=s) for (s, b, query), noise in unique.items()]
    ledger = ledger_of(*rows)
    found = {(e.sample_rate, float(f"{e.noise_multiplier:.6g}")): e.count for e in ledger.events()}
    assert found == by_hand(rows)
    assert ledger.steps == len({(each.stream, each.batch) for each in rows})


def test_two_sampling_rates_in_a_batch() -> None:
    ledger = ledger_of(row(0))
    with pytest.raises(LedgerError, match="sampling rates"):
        ledger.append(row(0, query="norms", sample_rate=0.02))
    assert len(ledger) == 1  # refused whole
    apart = ledger_of(row(0), row(1), row(0, query="norms", sample_rate=0.02))
    with pytest.raises(LedgerError, match="sampling rates"):
        apart.events()


def test_a_query_twice_in_a_batch() -> None:
    ledger = ledger_of(row(0))
    with pytest.raises(LedgerError, match="already released"):
        ledger.append(row(0))
    with pytest.raises(LedgerError, match="twice"):
        ledger_of(row(0), row(1), row(0)).events()
    with pytest.raises(LedgerError, match="twice"):
        ledger_of(row(0), row(1), row(0, query="norms"), row(0)).events()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sensitivity": 0.0},
        {"sensitivity": math.inf},
        {"noise_multiplier": -1.0, "noise_std": -2.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf, "noise_std": math.inf},
        {"noise_std": 2.0},  # a std that belongs to another multiplier
        {"noise_std": math.nan},
        {"sample_rate": 0.0},
        {"sample_rate": 1.5},
        {"sample_rate": math.nan},
        {"batch": -1},
        {"batch": 2**63},
        {"step": 0.5},
    ],
)
def test_rows_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(LedgerError):
        replace(row(3), **wrong)  # type: ignore[arg-type]


def test_merge_adds_what_is_missing_once() -> None:
    ledger = ledger_of(row(0), row(1))
    journal = [row(1), row(2), row(2), row(1, query="norms"), row(1, stream="b")]
    assert ledger.merge(journal) == 3
    assert ledger.merge(journal) == 0
    assert ledger.steps == 4 and len(ledger) == 5
    assert ledger.keys() == {
        ("a", 0, "gradient"),
        ("a", 1, "gradient"),
        ("a", 2, "gradient"),
        ("a", 1, "norms"),
        ("b", 1, "gradient"),
    }


def test_rows_can_be_read_while_appending() -> None:
    ledger = ledger_of(row(0), row(1))
    for each in ledger.rows():
        ledger.append(row(each.batch + 10))
    assert len(ledger) == 4


def mixed() -> Ledger:
    return ledger_of(
        row(0, 1 / 3, 'grädient "x"'),
        row(0, 0.1 + 0.2, "norms"),
        row(1, 0.0, sample_rate=1.0),
        row(2**40, 1e-7, stream="b"),
    )


def test_jsonl_there_and_back(tmp_path: Path) -> None:
    ledger = mixed()
    path = tmp_path / "ledger.jsonl"
    ledger.to_jsonl(path)
    again = Ledger.from_jsonl(path)
    assert list(again.rows()) == list(ledger.rows())
    assert again.header == ledger.header
    assert again.events() == ledger.events()
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(ledger)
    assert json.loads(lines[0])["header"]["adjacency"] == "add/remove one record"
    assert [json.loads(line) for line in lines[1:]] == [asdict(each) for each in ledger.rows()]


def test_an_empty_ledger_there_and_back(tmp_path: Path) -> None:
    ledger_of().to_jsonl(tmp_path / "ledger.jsonl")
    assert len(Ledger.from_jsonl(tmp_path / "ledger.jsonl")) == 0
    other = mixed()
    other.load_state_dict(ledger_of().state_dict())
    assert len(other) == 0 and other.events() == []


def edited(lines: list[str], what: str) -> list[str]:
    if what == "a row gone":
        return lines[:-1]
    if what == "a row in the middle gone":
        return lines[:2] + lines[3:]
    if what == "cut inside a line":
        return lines[:-1] + [lines[-1][:20]]
    if what == "more noise":
        return [
            line.replace("0.30000000000000004", "0.9").replace("0.6000000000000001", "1.8")
            for line in lines
        ]
    if what == "another claim":
        return [lines[0].replace("DP-SGD", "DP-XXX")] + lines[1:]
    if what == "no header":
        return lines[1:]
    if what == "header cut":
        return [lines[0][:40]]
    if what == "another format":
        return [lines[0].replace('"zetaclip_ledger": 2', '"zetaclip_ledger": 99')] + lines[1:]
    return []


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a row gone", "should have 4 rows and has 3"),
        ("a row in the middle gone", "should have 4 rows and has 3"),
        ("cut inside a line", "line 5"),
        ("more noise", "digest"),
        ("another claim", "digest"),
        ("no header", "header"),
        ("header cut", "header"),
        ("another format", "format 99"),
        ("empty", "header"),
    ],
)
def test_a_cut_or_edited_file_is_noticed(tmp_path: Path, what: str, says: str) -> None:
    path = tmp_path / "ledger.jsonl"
    mixed().to_jsonl(path)
    lines = path.read_text().splitlines()
    changed = edited(lines, what)
    assert changed != lines
    path.write_text("".join(line + "\n" for line in changed))
    with pytest.raises(LedgerError, match=says) as caught:
        Ledger.from_jsonl(path)
    assert "ledger.jsonl" in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LedgerError):
        Ledger.from_jsonl(path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger_of(row(0)).to_jsonl(path)
    before = path.read_bytes()

    def no_space(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        mixed().to_jsonl(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_state_dict_through_torch_save(tmp_path: Path) -> None:
    for ledger in (mixed(), ledger_of(row(5)), ledger_of()):
        torch.save(ledger.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        again = Ledger(replace(HEADER, method="another"))
        again.append(row(77))
        again.load_state_dict(state)
        assert list(again.rows()) == list(ledger.rows())
        assert again.header == ledger.header
        assert again.events() == ledger.events()
        again.append(row(2**50, stream="c"))  # and goes on
        assert len(again) == len(ledger) + 1


def test_a_state_that_is_none_changes_nothing() -> None:
    ledger = mixed()
    rows = list(ledger.rows())
    good = ledger.state_dict()
    shorter = good["columns"] | {"noise_std": good["columns"]["noise_std"][:1]}
    for bad in (
        {},
        good | {"format": 3},
        good | {"columns": shorter},
        good | {"names": []},
        good | {"columns": good["columns"] | {"query": -good["columns"]["query"] - 1}},
        good | {"header": {}},
        good
        | {
            "columns": good["columns"]
            | {"noise_multiplier": good["columns"]["noise_multiplier"] + 1}
        },
    ):
        with pytest.raises(LedgerError):
            ledger.load_state_dict(bad)
        assert list(ledger.rows()) == rows


def test_header_says_what_is_claimed() -> None:
    assert HEADER.claims_privacy and HEADER.adjacency == "add/remove one record"
    assert not replace(HEADER, claim="none: divides by the realised batch size").claims_privacy
    with pytest.raises(LedgerError):
        replace(HEADER, claim="trust me")
    with pytest.raises(LedgerError):
        replace(HEADER, num_examples_source="guessed")  # type: ignore[arg-type]


def test_summary_reads_like_a_sentence() -> None:
    text = ledger_of(*[row(batch) for batch in range(3)]).summary()
    for part in (
        "DP-SGD",
        "3 steps",
        "differential privacy",
        "60000 (declared)",
        "3 x q = 0.01",
        "1.1",
    ):
        assert part in text
    assert "seed" not in text
    seeded = Ledger(replace(HEADER, noise_seed_known=True))
    for batch in range(20):
        seeded.append(row(batch, 1.0 + batch))
    assert "seed is known" in seeded.summary() and "13 more" in seeded.summary()
    assert len(seeded.summary().splitlines()) < 15
