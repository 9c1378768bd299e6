"""The lines that carry the guarantee, a way to break each, and the tests that must notice.

A mutation names a file (or a glob) under ``src/zetaclip`` and a text in it. Exactly one file must
contain the text, and it must contain it once. After a change of such a line, change its text here
too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One change that must make its tests fail."""

    name: str
    file: str  # a glob under src/zetaclip
    edits: dict[str, str]  # old text: new text
    tests: tuple[str, ...]


def find(package: Path, mutation: Mutation) -> Path:
    """The one file that holds all the texts of a mutation.

    Raises:
        ValueError: A text does not occur, or occurs more than once.
    """
    for old in mutation.edits:
        found = [
            (path, count)
            for path in sorted(package.glob(mutation.file))
            if (count := path.read_text(encoding="utf-8").count(old))
        ]
        total = sum(count for _, count in found)
        if total != 1:
            how = "does not occur" if not total else f"occurs {total} times"
            raise ValueError(f"{mutation.name}: {old!r} {how} in {mutation.file}")
        place = found[0][0]
    return place


MUTATIONS: list[Mutation] = []


def _add(name: str, file: str, old: str | dict[str, str], new: str = "", *tests: str) -> None:
    edits = old if isinstance(old, dict) else {old: new}
    MUTATIONS.append(Mutation(name, file, edits, tuple(f"tests/{test}" for test in tests)))


ENGINE = "engine/**/*.py"

# -- the grid and the sensitivity ------------------------------------------------------------------

_add(
    "S' without the slack",
    "grid.py",
    "return bound * (1 + SLACK)",
    "return bound",
    "test_grid.py",
)
_add(
    "the slack is half of what it must cover",
    "grid.py",
    "SLACK = 2.0**-9",
    "SLACK = 2.0**-10",
    "test_grid.py",
)
_add(
    "the grid is twice as coarse",
    "grid.py",
    "bound / 1024 / root",
    "bound / 512 / root",
    "test_grid.py",
)
_add(
    "the grid ignores the number of coordinates",
    "grid.py",
    "root = 2 ** math.ceil(",
    "root = 1 ** math.ceil(",
    "test_grid.py",
)
_add(
    "the grid is coarse beside the noise",
    "grid.py",
    "noise_multiplier * bound / 2**16",
    "noise_multiplier * bound",
    "test_grid.py",
)
_add(
    "a row's grid need not be a power of two",
    "grid.py",
    " or math.frexp(grid)[0] != 0.5",
    "",
    "test_grid.py",
)
_add(
    "sums beyond what float64 can count are let through",
    "mechanism.py",
    "if self.grid and 16 * records",
    "if False and 16 * records",
    "test_grid.py::test_sums_that_float64_can_not_count_are_refused",
)

# -- the mechanism ---------------------------------------------------------------------------------

_add(
    "the sum is not rounded (numpy)",
    "randomness/_numpy.py",
    "to_whole(values, inverse)",
    "values *= inverse",
    "test_randomness.py::test_noise_is_rounded_and_added_to_rounded_sums",
)
_add(
    "the noise is not rounded (numpy)",
    "randomness/_numpy.py",
    "to_whole(noise, scale)",
    "noise *= scale",
    "test_randomness.py::test_noise_is_rounded_and_added_to_rounded_sums",
)
_add(
    "the sum is not rounded (C)",
    "randomness/_chacha.c",
    "(sum[i] * inverse + ROUNDER) - ROUNDER",
    "sum[i] * inverse",
    "test_randomness.py::test_noise_is_rounded_and_added_to_rounded_sums",
)
_add(
    "the noise is not rounded (C)",
    "randomness/_chacha.c",
    "((normal[i] * scale + ROUNDER) - ROUNDER)",
    "(normal[i] * scale)",
    "test_randomness.py::test_noise_is_rounded_and_added_to_rounded_sums",
)
_add(
    "two thirds of the noise",
    "mechanism.py",
    "self.std / self.grid)",
    "self.std / self.grid * 2 / 3)",
    "test_noise.py::test_noise_has_the_declared_level",
)
_add(
    "noise scaled by the bound alone",
    "mechanism.py",
    "return self.multiplier * self.sensitivity",
    "return self.multiplier * self.bound",
    "test_grid.py",
)
_add(
    "the ledger row is written after the noise",
    "engine/_loop.py",
    {
        "from ..methods import Method, Plan\n": (
            "from ..mechanism import Receipt\nfrom ..methods import Method, Plan\n"
        ),
        "receipt = self.log.write(mechanism.declare())": "receipt = Receipt(mechanism.declare())",
        "        released = mechanism.release(receipt, self.group, divisor)\n": (
            "        released = mechanism.release(receipt, self.group, divisor)\n"
            "        self.log.write(receipt.rows)\n"
        ),
    },
    "",
    "test_resume.py::test_a_release_that_was_cut_off_does_not_lend_its_noise",
)
_add(
    "noise is drawn with the receipt of other rows",
    "mechanism.py",
    "if main is None or receipt.rows != self._rows:",
    "if main is None:",
    "test_private_loop.py::test_no_noise_is_drawn_without_a_receipt_for_these_very_rows",
)
_add(
    "a receipt serves two releases",
    "mechanism.py",
    "        self._main = None\n        spread = ",
    "        spread = ",
    "test_private_loop.py::test_a_receipt_serves_one_release",
)
_add(
    "a receipt is given for rows that are not in the ledger",
    "engine/_release_log.py",
    "                self.ledger.append(row)\n",
    "                pass\n",
    "test_private_loop.py::test_rows_stand_in_the_ledger_when_the_noise_is_drawn",
)
_add(
    "a receipt is given for the first row alone",
    "engine/_release_log.py",
    "return Receipt(rows)",
    "return Receipt(rows[:1])",
    "methods/test_methods_suite.py::"
    "test_the_ledger_holds_what_was_planned_and_costs_no_more_than_the_budget",
)
_add(
    "own queries are released without a row",
    "mechanism.py",
    "for query in (self._main, *self._own.values())",
    "for query in (self._main,)",
    "methods/test_methods_suite.py::"
    "test_the_ledger_holds_what_was_planned_and_costs_no_more_than_the_budget",
)
_add(
    "a batch that was refused can still be released",
    "mechanism.py",
    "        self._main = None\n        self._extras, self._kinds = {}, {}\n",
    "        self._extras, self._kinds = {}, {}\n",
    "test_private_loop.py::test_what_was_refused_is_not_released",
)
_add(
    "the sums of the ranks are not added up",
    "mechanism.py",
    "if group.count == 1 or not (len(total) or extras):",
    "if True:",
    "ranks/test_ranks_sums.py",
)
_add(
    "perturbed weights are not put back",
    "engine/_loop.py",
    "        if self._moves:\n",
    "        if False:\n",
    "test_interfaces.py::test_a_perturbation_is_on_while_the_batch_is_out_and_undone_bitwise",
)
_add(
    "a release that was begun has not used its noise",
    "engine/_loop.py",
    "batch.stage, batch.used = Stage.RELEASED, True",
    "batch.stage = Stage.RELEASED",
    "test_resume.py::test_a_release_that_was_cut_off_does_not_lend_its_noise",
)
_add(
    "the streams do not move on with a release",
    "engine/_loop.py",
    "self.state, self.batch = self.batches.after(self.state, batch.drawn), None",
    "self.state, self.batch = replace(self.state, batch=self.state.batch + 1), None",
    "test_noise.py",
)
_add(
    "a checkpoint holds the weights in the middle of an update",
    "engine/_hooks.py",
    "with self._loop.model.weights.restored():",
    "if True:",
    "test_private_loop.py::test_what_hooks_collect_inside_an_update_is_its_start",
)
_add(
    "the divisor is the realised size",
    ENGINE,
    "mechanism, divisor = batch.mechanism, batch.mechanism.draw.divisor",
    "mechanism, divisor = batch.mechanism, float(max(1, batch.mechanism.records))",
    "test_noise.py::test_dividing_by_the_constant_doubles_when_the_records_do",
)
_add(
    "an empty batch's row of zeros counts as a record",
    ENGINE,
    "if not records:\n            return ()\n",
    "if False:\n            return ()\n",
    "test_survivors.py::test_an_empty_batch_adds_no_row_of_zeros",
)
_add(
    "own queries get the noise of the sum",
    "mechanism.py",
    "own.get(name, main).noised(",
    "main.noised(",
    "test_interfaces.py::test_an_own_query_has_its_own_row_noise_and_cost",
)
_add(
    "own queries are counted with half their sensitivity",
    "clipping/_rules.py",
    "Extra(below, sensitivity=0.5,",
    "Extra(below, sensitivity=0.25,",
    "methods/test_methods_rules.py::test_the_noisy_clip_rate_has_the_level_of_its_row",
)
_add(
    "an own query's columns are not checked",
    "mechanism.py",
    "check_columns(extra.columns, extra.sensitivity,",
    "str((extra.columns, extra.sensitivity),",
    "test_survivors.py::test_columns_beyond_their_bound_stop_the_run_before_anything_is_released",
)
_add(
    "an empty batch releases no extras",
    "mechanism.py",
    "if self._beside and not self._kinds:",
    "if False:",
    "test_interfaces.py::test_extras_are_released_from_an_empty_batch_too",
)
_add(
    "the sum is taken in float32",
    "mechanism.py",
    "np.zeros(self.size))",
    "np.zeros(self.size, np.float32))",
    "test_neighbours.py::test_many_small_records_are_not_lost_beside_many_large_ones",
)
_add(
    "decoupled by S' instead of S",
    "mechanism.py",
    "draw.clip, self.bound, std,",
    "draw.clip, self.sensitivity, std,",
    "test_optimizer.py::test_decoupling_divides_by_the_sensitivity_for_every_optimizer",
)
_add(
    "every rank draws the noise",
    "mechanism.py",
    "draw.sum_key if spread or group.first else None",
    "draw.sum_key",
    "ranks/test_ranks_sums.py::test_the_noise_is_drawn_once",
)
_add(
    "only the first rank draws noise for its part of the parameters",
    "mechanism.py",
    "draw.sum_key if spread or group.first else None",
    "draw.sum_key if group.first else None",
    "ranks/test_ranks_shards.py::test_every_rank_adds_the_noise_of_its_own_key_to_its_own_part_on_"
    "one_grid",
)
_add(
    "the parts of two ranks share noise",
    "mechanism.py",
    'subkey(self.noise_key, f"sum{self.owner}")',
    'subkey(self.noise_key, "sum")',
    "ranks/test_ranks_shards.py::test_no_two_parts_share_noise_and_each_has_the_declared_one",
)
_add(
    "ranks that have parts of the parameters toss the same coins",
    "mechanism.py",
    'subkey(self.noise_key, f"coins{self.owner}")',
    'subkey(self.noise_key, "coins")',
    "ranks/test_ranks_shards.py::test_every_rank_adds_the_noise_of_its_own_key_to_its_own_part_on_"
    "one_grid",
)
_add(
    "a rank's grid is that of its own part",
    "mechanism.py",
    "draw, coordinates, own = self.draw, self.layout.numel, {}",
    "draw, coordinates, own = self.draw, self.layout.own, {}",
    "ranks/test_ranks_shards.py::test_every_rank_adds_the_noise_of_its_own_key_to_its_own_part_on_"
    "one_grid",
)
_add(
    "weights that were gathered may be written in forward",
    "engine/_sharding.py",
    "(0 if whole is None else whole._version)",
    "0",
    "ranks/test_ranks_shards.py::test_a_rank_that_refuses_its_batch_stops_all_of_them",
)
_add(
    "ranks don't compare batch and C",
    "engine/_group/_ranks.py",
    "place = zlib.crc32(what.encode())",
    "place = 0",
    "ranks/test_ranks_trouble.py::"
    "test_ranks_with_different_c_release_nothing_until_all_of_them_load",
)
_add(
    "ranks don't compare where they meet",
    "engine/_group/_ranks.py",
    "self._check_place([place for place, _ in found], what)",
    "pass",
    "ranks/test_ranks_shards.py::test_ranks_that_were_interrupted_at_different_places_do_not_go_on",
)
_add(
    "gathered weights keep a raw gradient",
    "engine/_guard.py",
    "if left or parameter.grad is not None:",
    "if parameter.grad is not None:",
    "ranks/test_ranks_shards.py::test_gradients_outside_of_layers_are_refused_and_never_added_up",
)

# -- clipping --------------------------------------------------------------------------------------

_add(
    "short gradients are scaled up",
    "clipping/_base.py",
    ".div_(norms.clamp_min(clip))",
    ".div_(norms)",
    "gradients/test_rows.py::test_flat_factors_are_one_up_to_c",
)
_add(
    "factors are not checked",
    "clipping/_base.py",
    "_check_farthest(farthest(norms, factors, joint), sensitivity, rule)",
    "pass",
    "test_clipping.py::test_a_rule_that_breaks_its_word_is_stopped",
    "gradients/test_rows.py::test_the_check_of_factors_sees_every_record",
)
_add(
    "a factor of nan passes the check",
    "clipping/_base.py",
    "if not farthest <= sensitivity * (1 + 1e-6):",
    "if farthest > sensitivity * (1 + 1e-6):",
    "test_clipping.py::test_a_rule_that_breaks_its_word_is_stopped",
    "gradients/test_rows.py::test_the_check_of_factors_sees_every_record",
)
_add(
    "columns that share the Gaussian are left out of the check",
    "clipping/_base.py",
    "    check_factors(norms, factors, joint,",
    "    check_factors(norms, factors, None,",
    "test_survivors.py::test_columns_beyond_their_bound_stop_the_run_before_anything_is_released",
)
_add(
    "records that are not finite are kept",
    "gradients/reduce.py",
    "[part.blank(bad) for part in parts]",
    "[part for part in parts]",
    "test_neighbours.py::test_a_poisoned_record_cannot_poison_the_run",
)
_add(
    "records that are not finite are kept under a map",
    "gradients/reduce.py",
    "[part.blank(bad) for part in some]",
    "[part for part in some]",
    "test_survivors.py::test_a_record_that_is_not_finite_counts_as_zero_under_a_map",
)
_add(
    "the mean over a chunk is not undone",
    ENGINE,
    "return (Chunk(received, self.layout, rows, scale),)",
    "return (Chunk(received, self.layout, rows, 1.0),)",
    "test_engine.py::test_sum_and_mean_losses_agree",
)
_add(
    "the norm leaves out what underflow hid (C)",
    "gradients/_rows.c",
    "double hidden = sqrt(",
    "double hidden = 0.0 * sqrt(",
    "gradients/test_rows.py::test_what_underflow_hides_counts_beside_a_large_factor",
)
_add(
    "the length leaves out a part of the gradient (C)",
    "gradients/_tiles.h",
    "for (int i = 0; i < LANES / 2; i++) total += low[i];",
    "for (int i = 1; i < LANES / 2; i++) total += low[i];",
    "gradients/test_products.py::test_norm_and_sum_are_of_the_same_numbers",
)
_add(
    "gradients of several positions are added up in float32 (C)",
    "gradients/_tiles.h",
    "            to[0] += factor * WIDEN(own.halves[0]);",
    "            to[0] += factor * WIDEN(own.halves[0]);\n"
    "            to[0] = __builtin_convertvector(\n"
    "                __builtin_convertvector(to[0], NAME(half)), NAME(wide));",
    "gradients/test_products.py::test_a_record_adds_the_same_beside_any_others_in_float64",
)
_add(
    "what a few records add is added up in float32 (C)",
    "gradients/_tiles.h",
    "to[k * j->spread] += own[k];",
    "to[k * j->spread] = (float)(to[k * j->spread] + own[k]);",
    "gradients/test_products.py::test_a_record_adds_the_same_beside_any_others_in_float64",
)
_add(
    "products of single vectors are added up in float32 (C)",
    "gradients/_tiles.h",
    "total[m * columns + k] += from[k];",
    "total[m * columns + k] = (float)(total[m * columns + k] + from[k]);",
    "gradients/test_products.py::test_a_record_adds_the_same_beside_any_others_in_float64",
)
_add(
    "products of a few outputs are added up in float32 (C)",
    "gradients/_tiles.h",
    "total[m * apart + k] += ((const double *)made[m])[k];",
    "total[m * apart + k] = (float)(total[m * apart + k] + ((const double *)made[m])[k]);",
    "gradients/test_products.py::test_a_record_adds_the_same_beside_any_others_in_float64",
)
_add(
    "threads change how records are added up (C)",
    "gradients/_products.c",
    "size_t some = 4 * j->weights / own",
    "size_t some = 4 * j->weights * (stop - first) / (own * l->s.outputs)",
    "gradients/test_products.py::test_threads_change_nothing",
)
_add(
    "every thread adds all rows of pixels (C)",
    "gradients/_products.c",
    "first == 0 ? j->rows : 0;",
    "j->rows;",
    "gradients/test_products.py::test_threads_change_nothing",
)
_add(
    "every thread draws the noise of the first (C)",
    "randomness/_chacha.c",
    "some = stop - done < VALUES ? stop - done : VALUES, group = done / VALUES;",
    "some = stop - done < VALUES ? stop - done : VALUES, group = (done - first) / VALUES;",
    "test_dealing.py::test_noise_is_the_same_in_any_number_of_threads",
)
_add(
    "the last share of the work is left out",
    "_team.h",
    "__ATOMIC_RELAXED)) < all->count)",
    "__ATOMIC_RELAXED)) + all->share < all->count)",
    "test_dealing.py::test_every_column_is_summed_once_whoever_takes_the_shares",
)
_add(
    "a unit gets a row of another one (C)",
    "gradients/_rows.c",
    "const float *row = values + (size_t)index[slot] * width;",
    "const float *row = values + (size_t)(index[slot] ? index[slot] - 1 : 0) * width;",
    "test_dealing.py::test_joined_rows_are_weighted_sums_of_rows_in_any_number_of_threads",
)
_add(
    "a norm by Gram matrices is believed whatever cancels",
    "gradients/grams.py",
    "return max(TRUSTED, positions * 2.0**-13) if made else TRUSTED",
    "return TRUSTED",
    "gradients/test_products.py::test_a_gradient_that_cancels_is_not_measured_by_gram_matrices",
)
_add(
    "a chunk is added twice after a failed step",
    ENGINE,
    "                batch.stage = Stage.SPOILED\n                batch.mechanism",
    "                batch.mechanism",
    "test_engine.py::test_a_step_that_failed_while_adding_is_not_tried_again_on_top_of_itself",
)

# -- keys, noise and coins -------------------------------------------------------------------------

_add(
    "the coins have the key of the sum",
    "mechanism.py",
    'subkey(self.noise_key, f"coins{self.owner}")',
    'subkey(self.noise_key, f"sum{self.owner}")',
    "test_randomness.py::test_every_use_of_a_batch_has_a_key_of_its_own",
)
_add(
    "all own queries have one key",
    "mechanism.py",
    'f"extra {name}"',
    '"extra"',
    "test_randomness.py::test_every_use_of_a_batch_has_a_key_of_its_own",
)
_add(
    "the key of a draw is shown",
    "mechanism.py",
    "noise_key: bytes = field(repr=False)",
    "noise_key: bytes",
    "redteam/test_secrets_in_reprs.py",
)
_add(
    "coins are tossed twice",
    "mechanism.py",
    "begin, self._asked = self._asked, self._asked + count",
    "begin, self._asked = 0, count",
    "test_randomness.py::test_coins_are_the_same_however_they_are_asked_for",
)
_add(
    "the tail has the nonce of the noise (numpy)",
    "randomness/_numpy.py",
    "NOISE, TAIL, COINS = 0, 1, 2",
    "NOISE, TAIL, COINS = 0, 0, 2",
    "test_randomness.py::test_every_value_is_the_normal_value_of_its_bits",
)
_add(
    "the tail has the nonce of the noise (C)",
    "randomness/_chacha.c",
    "TAIL = 1,",
    "TAIL = 0,",
    "test_randomness.py::test_every_value_is_the_normal_value_of_its_bits",
)
_add(
    "the coins have the nonce of the noise (numpy)",
    "randomness/_numpy.py",
    "NOISE, TAIL, COINS = 0, 1, 2",
    "NOISE, TAIL, COINS = 0, 1, 0",
    "test_randomness.py::test_uniforms_have_53_bits",
)
_add(
    "the coins have the nonce of the noise (C)",
    "randomness/_chacha.c",
    "COINS = 2 }",
    "COINS = 0 }",
    "test_randomness.py::test_uniforms_have_53_bits",
)
_add(
    "a buffer's length is not checked (C)",
    "gradients/_buffers.h",
    "!= count)",
    "< 0)",
    "gradients/test_rows.py::test_buffers_of_another_type_or_length_are_refused",
)
_add(
    "fewer rounds of the cipher (C)",
    "randomness/_chacha.c",
    "#define ROUNDS 12",
    "#define ROUNDS 6",
    "test_randomness.py::test_both_sources_agree_bit_for_bit",
)
_add(
    "secrets are wiped by a memset that compilers may leave out",
    "randomness/_chacha.c",
    "explicit_bzero(secret, size);",
    "memset(secret, 0, size);",
    "test_survivors.py::test_secrets_are_wiped_by_a_function_that_no_compiler_leaves_out",
)
_add(
    "subkeys ignore their label",
    "randomness/_streams.py",
    "return _derive(key, label.encode())",
    'return _derive(key, b"label")',
    "test_randomness.py::test_every_use_of_a_batch_has_a_key_of_its_own",
)
_add(
    "a stream does not move on",
    "randomness/_streams.py",
    'return _derive(state, b"draw"), _derive(state, b"next")',
    'return _derive(state, b"draw"), state',
    "test_randomness.py::test_a_stream_moves_one_way_and_never_repeats",
)
_add(
    "a stream's state is the key that it drew last",
    "randomness/_streams.py",
    'return _derive(state, b"draw"), _derive(state, b"next")',
    'return _derive(state, b"draw"), _derive(state, b"draw")',
    "test_survivors.py::test_a_streams_state_is_no_key_that_it_drew",
)
_add(
    "two names of a seed give one stream",
    "randomness/_streams.py",
    'f"zetaclip {name} {seed}"',
    'f"zetaclip {seed}"',
    "test_randomness.py::test_a_stream_moves_one_way_and_never_repeats",
)
_add(
    "dropout masks follow the user's seed",
    "randomness/_forward.py",
    "            _follow(key)\n",
    "",
    "test_forward_rng.py",
)

# -- sampling --------------------------------------------------------------------------------------

_add(
    "Poisson coins in float32",
    "randomness/_noise.py",
    "uniforms(key, records) < sample_rate",
    "uniforms(key, records).astype(np.float32) < np.float32(sample_rate)",
    "test_grid.py::test_a_rate_between_a_coin_and_its_float32_is_met_as_declared",
)
_add(
    "a tenth more records than declared",
    "randomness/_noise.py",
    "uniforms(key, records) < sample_rate",
    "uniforms(key, records) < 1.1 * sample_rate",
    "test_sampling.py::test_every_record_is_drawn_at_the_declared_rate_and_independently",
)
_add(
    "a record may be in the data twice",
    ENGINE,
    "if _repeats(loader.dataset):",
    "if False:",
    "test_sampling.py::test_a_record_that_is_in_the_data_twice_is_refused_however_it_got_there",
)
_add(
    "ranks toss the same coins",
    ENGINE,
    'f" of rank {self.rank} of {self.count}"',
    '""',
    "ranks/test_ranks_sums.py::test_the_ranks_keys_differ",
)
_add(
    "a record is dealt to two ranks",
    ENGINE,
    "order[rank::ranks]",
    "order[rank:]",
    "ranks/test_ranks_sums.py::test_every_record_is_dealt_to_one_rank",
)

# -- the ledger, the journal and replays -----------------------------------------------------------

_add(
    "two passes over one batch are planned as the larger",
    "methods/_noise_plan.py",
    "batches[-1] += cost",
    "batches[-1] = max(batches[-1], cost)",
    "methods/test_methods_plans.py::test_passes_over_one_batch_cost_both_together",
)
_add(
    "a rule's own query is not planned",
    "methods/_noise_plan.py",
    "for s in (at(schedule, step), beside)",
    "for s in (at(schedule, step),)",
    "methods/test_methods_plans.py",
    "methods/test_methods_suite.py",
)
_add(
    "two rows of one batch count as the larger",
    "ledger/*.py",
    "np.add.reduceat(",
    "np.maximum.reduceat(",
    "test_ledger.py::test_rows_of_one_batch_are_one_gaussian",
)
_add(
    "a query may be released twice from one batch",
    "ledger/*.py",
    "elif query in self._open_queries:",
    "elif False:",
    "test_ledger.py::test_a_query_twice_in_a_batch",
)
_add(
    "a row's numbers need not agree",
    "ledger/*.py",
    "            and abs(std - multiplier * sensitivity) <= ROUNDED * std\n",
    "",
    "test_ledger.py::test_rows_that_cannot_be",
)
_add(
    "a row's sensitivity need not hold the slack",
    "grid.py",
    "abs(sensitivity - widened(bound)) <= ROUNDED * sensitivity and ",
    "",
    "test_grid.py::test_a_row_checks_its_clip_and_grid",
)
_add(
    "steps are not journaled",
    ENGINE,
    "journal.append(rows)",
    "pass",
    "test_resume.py::test_load_without_replay_takes_fresh_keys_and_counts_what_was_executed",
)
for _which, _left in (
    ("first", "self.journals[1:] or self.journals"),
    ("second", "self.journals[:1] + self.journals[2:]"),
    ("last", "self.journals[:1] + self.journals[1:-1]"),
):
    _add(
        f"the {_which} of several journals is skipped",
        "engine/_release_log.py",
        "for journal in self.journals:",
        f"for journal in {_left}:",
        "test_resume.py::test_one_folder_that_is_left_knows_every_step",
    )
_add(
    "steps after a checkpoint are forgotten",
    "ledger/_journal.py",
    "return [row for row in rows if row.key not in present]",
    "return []",
    "test_journal.py::test_what_must_join_the_ledger",
)
_add(
    "two rows under one draw of noise are no error",
    "ledger/_journal.py",
    "            if found.setdefault(row.key, row) != row:\n                raise LedgerError(\n"
    '                    f"{self.path.name}, line',
    "            if found.setdefault(row.key, row) is None:\n                raise LedgerError(\n"
    '                    f"{self.path.name}, line',
    "test_journal.py::test_one_draw_for_two_releases_is_an_error",
)
_add(
    "a replay confirms whatever comes out",
    "ledger/_journal.py",
    "if self._known.get(key, fingerprint) != fingerprint:",
    "if False:",
    "test_resume.py::test_a_replay_by_another_loop_is_stopped_before_it_releases",
)
_add(
    "a replay is not asked to confirm",
    ENGINE,
    "if not self.home.confirm((draw.stream, draw.batch, draw.query), mark):",
    "if False:",
    "test_resume.py::test_a_replay_by_another_loop_is_stopped_before_it_releases",
)
_add(
    "a replay may write other rows",
    ENGINE,
    "if self.expected.get(row.key, row) != row:",
    "if False:",
    "test_resume.py::test_a_replay_that_is_not_exact_is_stopped",
)
_add(
    "a replay of other data",
    ENGINE,
    '"data": loop.batches.digest(),\n        "ranks"',
    '"data": secret["data"],\n        "ranks"',
    "test_resume.py::test_replay_is_refused_where_anything_differs",
)
_add(
    "a batch that is tried again has the same noise",
    ENGINE,
    "self.group.gather(batch.used or moved, what)",
    "self.group.gather(False, what)",
    "test_resume.py::test_a_release_that_was_cut_off_does_not_lend_its_noise",
)
_add(
    "everybody who loads a checkpoint draws the same noise",
    ENGINE,
    "noise.append(Stream.fresh().state)",
    "noise.append(bytes(32))",
    "test_resume.py::test_two_forks_of_a_run_do_not_share_noise",
)
_add(
    "the secrets of a checkpoint can be read by all",
    ENGINE,
    "mode=0o600",
    "mode=0o644",
    "test_resume.py::test_replay_needs_the_private_file_and_it_is_private",
)

# -- the guards ------------------------------------------------------------------------------------

for _check, _test in {
    "gradients": "test_engine.py::test_a_gradient_that_autograd_wrote_is_an_error_at_any_step",
    "unwritten": "test_guard.py::test_a_small_buffer_that_begins_to_learn_late",
    "rewritten": "test_guard.py::"
    "test_what_was_written_once_stays_an_error_until_it_is_written_over",
    "hooks": "gradients/test_as_torch.py::test_backward_hooks_of_the_old_kind_are_refused",
}.items():
    _add(
        f"the guard does not check: {_check}",
        "engine/_guard.py",
        f"self._check_{_check}()",
        "pass",
        _test,
    )
_add(
    "the guard does not check: structure",
    "engine/_guard.py",
    "if self._look() != self._outline:",
    "if False:",
    "test_guard.py::test_a_module_that_was_rebuilt",
)
_add(
    "the guard does not check: what is trained",
    "engine/_guard.py",
    "if trainable != self._trained:",
    "if False:",
    "test_guard.py::test_a_layer_unfrozen_inside_a_batch",
)
_add(
    "a fork may release",
    "engine/_loop.py",
    "    def _batch_to_step(self) -> OpenBatch:\n        self._check_ours()\n",
    "    def _batch_to_step(self) -> OpenBatch:\n",
    "test_guard.py::test_a_fork_of_a_run_does_not_draw_its_parents_noise",
)
_add(
    "a fork may open a batch",
    "engine/_loop.py",
    "if os.getpid() != self._process:",
    "if False:",
    "test_guard.py::test_a_fork_of_a_run_does_not_draw_its_parents_noise",
)
_add(
    "the user's own optimizer may step",
    "engine/_update.py",
    "if not self._open:",
    "if False:",
    "test_optimizer.py::test_the_optimizer_that_was_given_steps_only_inside_a_private_step",
)
_add(
    "a loss of another reduction goes through",
    ENGINE,
    "raise LossError(wrong)",
    "pass",
    "test_loss_check.py::test_a_later_change_of_the_loss_is_seen",
)
_add(
    "gradients are accumulated by hand",
    ENGINE,
    "self.batch is not None and self.batch.stage in _OUT:",
    "False:",
    "test_engine.py::test_accumulating_by_hand_is_refused",
)
