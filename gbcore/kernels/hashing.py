"""Interning: equal bytes, equal id."""

from typing import NamedTuple

import numpy as np
from numba import config
from numpy.typing import NDArray

from gbcore.jit import jit_in_place

if config.DISABLE_JIT:  # NumPy scalars warn where the hashes wrap around by design
    np.seterr(over="ignore")

EMPTY = -1  # a hash slot, a block or a free list with nothing in it
LIVE = -2  # link of an id in use
SEED_STEP = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64
TABLE_SIZE, TABLE_IDS, TABLE_FREE = 0, 1, 2


class Table(NamedTuple):
    """The arrays of an `Interner`, by id but for slots and totals; N ids, keys of W words."""

    slots: NDArray[np.int32]  # [S], id or EMPTY; linear probing, S a power of two >= 2 N
    hashes: NDArray[np.uint64]  # [N], hash of the key
    rows: NDArray[np.uint64]  # [N, W], the key, as 64-bit words padded with zeros
    links: NDArray[np.int32]  # [N], the next free id, or LIVE
    generations: NDArray[np.int32]  # [N], how often freed: with it, an id names one key for ever
    totals: NDArray[np.int64]  # [3], keys in use | ids ever given out | first free id or EMPTY


@jit_in_place
def mix(h):
    """Finaliser of splitmix64: every input bit reaches every output bit."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@jit_in_place
def hash_words(key):
    """64-bit hash of a key uint64 [W]: a sum over words and places, in vector instructions."""
    h = np.uint64(0)
    for i in range(key.shape[0]):
        word = key[i] ^ (np.uint64(i + 1) * SEED_STEP)
        word = (word ^ (word >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
        h += word ^ (word >> np.uint64(29))
    return mix(h)


@jit_in_place
def find_key(table, key, h):
    """Id of a key uint64 [W] with hash h, or EMPTY."""
    mask = table.slots.shape[0] - 1
    slot = np.int64(h & np.uint64(mask))
    while True:
        i = np.int64(table.slots[slot])
        if i == EMPTY:
            return i
        if table.hashes[i] == h:
            difference = np.uint64(0)  # all words: vector instructions, and hardly ever in vain
            for w in range(key.shape[0]):
                difference |= table.rows[i, w] ^ key[w]
            if difference == 0:
                return i
        slot = (slot + 1) & mask


@jit_in_place
def find_slot(slots, h, entry):
    """First slot of a probe sequence that holds an entry, which is there, or EMPTY."""
    mask = slots.shape[0] - 1
    slot = np.int64(h & np.uint64(mask))
    while slots[slot] != entry:
        slot = (slot + 1) & mask
    return slot


@jit_in_place
def rebuild_slots(table):
    """Hash every key in use anew, and fill empty slots with them."""
    for i in range(table.totals[TABLE_IDS]):
        if table.links[i] == LIVE:
            table.hashes[i] = hash_words(table.rows[i])
            table.slots[find_slot(table.slots, table.hashes[i], EMPTY)] = i


@jit_in_place
def intern_key(table, key):
    """Id of a key uint64 [W], inserted if new; EMPTY where a new key finds no room."""
    h = hash_words(key)
    i = find_key(table, key, h)
    if i != EMPTY:
        return i
    totals = table.totals
    i = totals[TABLE_FREE]
    if i == EMPTY:
        i = totals[TABLE_IDS]
        if i == table.hashes.shape[0]:
            return np.int64(EMPTY)
        totals[TABLE_IDS] += 1
        table.generations[i] = 0
    else:
        totals[TABLE_FREE] = table.links[i]
    totals[TABLE_SIZE] += 1
    table.links[i] = LIVE
    table.hashes[i] = h
    for w in range(key.shape[0]):
        table.rows[i, w] = key[w]
    table.slots[find_slot(table.slots, h, EMPTY)] = i
    return i


@jit_in_place
def intern_keys(table, keys, first, ids):
    """`intern_key` for uint64 [n, W] from row `first` on, into ids int64 [n].

    Returns the first row that finds no room, or n.
    """
    for k in range(first, keys.shape[0]):
        ids[k] = intern_key(table, keys[k])
        if ids[k] == EMPTY:
            return k
    return keys.shape[0]


@jit_in_place
def find_keys(table, keys, ids):
    """Ids of keys uint64 [n, W], or EMPTY, into ids int64 [n]."""
    for k in range(keys.shape[0]):
        ids[k] = find_key(table, keys[k], hash_words(keys[k]))


@jit_in_place
def free_key(table, i):
    """Forget the key of id i and put the id on the free list."""
    slots = table.slots
    mask = slots.shape[0] - 1
    slot = find_slot(slots, table.hashes[i], i)
    slots[slot] = EMPTY
    slot = (slot + 1) & mask
    while slots[slot] != EMPTY:  # the rest of the cluster is entered anew: no tombstones
        j = slots[slot]
        slots[slot] = EMPTY
        slots[find_slot(slots, table.hashes[j], EMPTY)] = j
        slot = (slot + 1) & mask
    table.generations[i] += 1
    table.links[i] = table.totals[TABLE_FREE]
    table.totals[TABLE_FREE] = i
    table.totals[TABLE_SIZE] -= 1


@jit_in_place
def release_keys(table, uses, ids):
    """Count one use fewer of each of ids int64 [n] in uses int64 [N], and forget keys without."""
    for i in ids:
        uses[i] -= 1
        if uses[i] == 0:
            free_key(table, i)


@jit_in_place
def join_bytes(stacks, words):
    """Stacks uint8 [n, 4, p] as words uint32 [n, p]: the four bytes of a place, in their order in
    the memory of a little-endian machine.
    """
    for i in range(words.shape[0]):
        for k in range(words.shape[1]):
            low = np.uint32(stacks[i, 0, k]) | np.uint32(stacks[i, 1, k]) << np.uint32(8)
            high = np.uint32(stacks[i, 2, k]) | np.uint32(stacks[i, 3, k]) << np.uint32(8)
            words[i, k] = low | high << np.uint32(16)
