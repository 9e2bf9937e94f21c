"""The compiled loops of gbcore: NumPy arrays in, NumPy arrays out; no torch, no gymnasium.

Arrays that belong together travel as one NamedTuple, which Numba takes apart at no cost. Kernels
do not validate: the modules that call them do, before.
"""
