"""Programs put together at random compute what they did, rewritten or not, and most layers are rewritten.

`make fuzz N=10000` draws others, as many as are asked for.  A program that was found to be wrong belongs to `NAMED`.
"""

from __future__ import annotations

import os

import pytest

from .judge import judge
from .programs import Program
from .runs import refusals, rewritten_share, run_programs

# Shards for the workers; each draws its own programs, the same in every run.  Another interpreter may draw fewer.
SHARDS, PROGRAMS = 4, int(os.environ.get("MOE_XLA_GENERATED", "75"))
LEAST_REWRITTEN = 0.95

NAMED: dict[str, Program] = {
    "ordinary": Program(),
    "scattered": Program(family="scatter"),
    "without_slots": Program(family="dense_all"),
    # padding that reads -1 takes no slot, so it may come back into the masks
    # the cotangent of y is the same for all tokens, and empty slots hold the bias
    "constant_cotangent_over_a_background": Program(grouped=True, masks="unrolled", biases=True, loss="sum"),
    # the largest position of two queues that stand one behind the other, and behind what is kept of the first
    "longest_queue": Program(order="offset", sample="where", metrics="queue"),
    "longest_queue_behind_kept_choices": Program(order="offset_kept", metrics="queue"),
    # the scores of other groups are infinite, in an array that has to be built behind a layer
    "infinite_scores_behind_a_layer": Program(chooser="group_limited", around="stack"),
    # single experts sliced out of an array over all of them
    "slices_of_every_expert": Program(family="dense_all", biases=True, batching="loop"),
    "saved_contractions": Program(order="offset", rank_dtype="float32", around="checkpoint_dots"),
    # how many are kept, of a capacity, where a test of positions says it and no mask over slots
    "use_rate_of_scattered_rows": Program(family="scatter", near_miss="use_rate"),
    # an expert's tokens counted one expert after the other, cut at the capacity, of which it is then a share
    "use_rate_of_lists": Program(family="list", walk="scanned", near_miss="use_rate"),
    # positions of padding tokens, which are not counted, are looked at where they have to be worked out
    "kept_padding_behind_a_layer": Program(padding="periodic", sample="take", around="stack", metrics="dropped"),
    # the forward and the backward pass are one layer, whose rate of use is seen in one of them
    "use_rate_in_one_of_two_passes": Program(family="list", walk="unrolled", around="map", near_miss="use_rate"),
    # the capacity is below the first slot, so that everything is dropped
    "no_slot_below_the_capacity": Program(near_miss="from_slot_three"),
    # padding tokens before the first token of an expert have no position there, and are not kept in dropless either
    "padding_without_a_position": Program(
        padding="data", rank="inside", sample="take", overflow="first_slot_sliced", around="map", metrics="dropped"
    ),
    # rows in a branch are ordered by what was kept in another one, which must be handed to it
    "kept_choices_of_another_branch": Program(
        pick="einsum", order="offset", rank_dtype="float64", activation="one_plus_tanh", around="cond", taken="x"
    ),
    # what the forward pass hands to the backward one is an array that is computed there again, from itself
    "saved_array_computed_anew": Program(choices=1, family="scatter", take="where", around="map"),
    # rows beyond the capacity read the last slot, but their cotangents do not reach it
    "visible_rows_differentiated_from_outside": Program(family="scatter", take="visible", taken="outside"),
    "padding_before_the_first_slot": Program(padding="periodic", rank="after", near_miss="padding_unmasked"),
}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs_are_right_and_rewritten(shard):
    verdicts = run_programs(PROGRAMS, seed=shard)
    assert rewritten_share(verdicts) >= LEAST_REWRITTEN, "\n".join(refusals(verdicts))


@pytest.mark.parametrize("name", NAMED)
def test_named_programs_are_right(name):
    judge(NAMED[name])


def test_programs_print_as_what_makes_them():
    program = Program(tokens=6, chooser="argsort", grouped=True)
    assert repr(program) == "Program(tokens=6, grouped=True, chooser='argsort')"
    assert eval(repr(program)) == program
