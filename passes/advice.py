"""What a user could write instead, for the reasons why layers are refused.

In: the reason of a `Site`.  Out: one sentence, or None where nothing helps but a new rule.
"""

from __future__ import annotations

# Part of a reason, and what helps; the first that is found counts.
_ADVICE = (
    (
        "which may come from the capacity",
        "keep counts out of what is divided by or compared with the capacity, or ask for semantics='exact'",
    ),
    (
        "in a way that depends on the capacity",
        "compare positions with the capacity once, for the mask, or ask for semantics='exact'",
    ),
    ("compared with different bounds", "use one capacity for all queues of a layer, or ask for semantics='exact'"),
    (
        "needs the work of every expert",
        "use the outputs of experts only under the weights of the chosen ones, which are exactly zero for the others",
    ),
    ("the work of every expert is a result", "return the layer's output, not the outputs of all experts"),
    (
        "lays the work of chosen experts out over all",
        "apply biases and gates after the experts, so that experts of zero give zero",
    ),
    (
        "array over the slot axis is a result",
        "return counts per expert (the sum of the one-hots) instead of masks and buffers",
    ),
    (
        "laid out over the slots",
        "apply dropout and other operations that draw or read slots to the tokens, before or after the experts",
    ),
    (
        "not provably unique in a scatter",
        "let what overflows be dropped, by an index out of range and mode='drop', or add rows that a mask makes zero",
    ),
    (
        "not provably unique",
        "count positions by one cumulative sum of the one-hots of the expert index, later choices behind earlier ones",
    ),
    (
        "provably the same or different",
        "mask the combined rows where position >= capacity, in integers, by the condition that dispatched them",
    ),
    ("index that is no queue position", "write rows to [expert, position] and read them from there"),
    ("not zero out of range", "read with .at[...].get(mode='fill', fill_value=0)"),
    ("matrix of an expert for every assignment", "contract gathered weights with rows at once, and with nothing else"),
    ("is run as written", "move the layer out of this body, or use lax.scan or jax.checkpoint"),
    ("is not looked for", "name the pattern in patterns="),
    ("no rule for custom_vjp_call", "put the custom_vjp around the whole layer, or use custom_jvp for activations"),
    ("no rule for sharding_constraint", "constrain the layer's input and output rather than its buffers"),
    (
        "weighted rows",
        "say in the step that the weights are 0 and 1, as by (paddings > 0).astype(x.dtype), or pass truth values",
    ),
    ("group sizes inside a shard_map", "cast the group sizes to int32"),
    ("is an algorithm", "give the precision as a jax.lax.Precision"),
    ("a maximum over", "take maxima over all slots of each expert, in all groups, or leave the metric out"),
    ("over slots", "reduce tokens or counts rather than slots"),
)


def advice_for(reason: str | None) -> str | None:
    """What to write instead of what a reason names, or None."""
    return next((advice for part, advice in _ADVICE if reason is not None and part in reason), None)
