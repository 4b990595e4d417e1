"""The operations in plain NumPy, in float64: loops over assignments and groups, nothing clever."""

from __future__ import annotations

import itertools

import numpy as np


def ranges(group_sizes):
    """The slice of rows of each group."""
    ends = np.cumsum(group_sizes)
    return [slice(end - size, end) for size, end in zip(group_sizes, ends, strict=True)]


def grouped_dot(rows, w, group_sizes):
    out = np.zeros((rows.shape[0], w.shape[2]))
    for expert, group in enumerate(ranges(group_sizes)):
        out[group] = np.asarray(rows[group], np.float64) @ np.asarray(w[expert], np.float64)
    return out


def grouped_outer(a, b, group_sizes):
    return np.stack([np.asarray(a[g], np.float64).T @ np.asarray(b[g], np.float64) for g in ranges(group_sizes)])


def group_sum(rows, group_sizes):
    return np.stack([np.asarray(rows[g], np.float64).sum(0) for g in ranges(group_sizes)])


def group_max(rows, group_sizes, initial):
    return np.stack([np.asarray(rows[g], np.float64).max(0, initial=initial) for g in ranges(group_sizes)])


def plan(expert_index, experts):
    """(permutation, inverse, group_sizes) by appending each assignment to its expert's queue."""
    queues = [[] for _ in range(experts + 1)]
    for assignment, expert in enumerate(np.ravel(expert_index)):
        queues[expert if 0 <= expert < experts else experts].append(assignment)
    permutation = np.array(list(itertools.chain(*queues)), np.int32)
    return permutation, np.argsort(permutation), np.array([len(q) for q in queues[:-1]], int)


def rank(expert_index, experts):
    seen = [0] * (experts + 1)
    ranks = []
    for expert in np.ravel(expert_index):
        queue = expert if 0 <= expert < experts else experts
        ranks.append(seen[queue])
        seen[queue] += 1
    return ranks


def layer(x, w, weights, expert_index):
    """y[t] = sum over k of weights[t, k] * x[t] @ w[expert_index[t, k]], over the experts that exist."""
    y = np.zeros((x.shape[0], w.shape[2]))
    for t, row in enumerate(expert_index):
        for k, expert in enumerate(row):
            if 0 <= expert < w.shape[0]:
                y[t] += float(weights[t, k]) * (np.asarray(x[t], np.float64) @ np.asarray(w[expert], np.float64))
    return y
