"""Sum tree: sampling in proportion to priority.

tree float64 [2 C], C a power of two: node i has children 2i and 2i + 1, the root is node 1,
priority j is node C + j.
"""

from gbcore.jit import jit_in_place


@jit_in_place
def set_priorities(tree, indices, priorities):
    """Write priorities in order, and the sums above each."""
    leaves = tree.shape[0] // 2
    for k in range(indices.shape[0]):
        i = leaves + indices[k]
        tree[i] = priorities[k]
        while i > 1:
            i //= 2
            tree[i] = tree[2 * i] + tree[2 * i + 1]


@jit_in_place
def find_priorities(tree, targets, indices):
    """Index of the priority under which each target in [0, total) falls."""
    leaves = tree.shape[0] // 2
    for k in range(targets.shape[0]):
        target = targets[k]
        i = 1
        while i < leaves:
            i *= 2
            # The second test keeps rounding from stepping into a subtree of sum 0.
            if target >= tree[i] and tree[i + 1] > 0.0:
                target -= tree[i]
                i += 1
        indices[k] = i - leaves
