"""The model written like its equations, in PyTorch on the CPU: the oracle that the engine is checked against.

Every function computes in the dtype of its inputs (float32 or float64), one sequence at a time, tokens first:
shapes are [T, ...] without a batch dimension. It has no options and seeks no speed. Imports torch only.

Letters in shapes: T tokens, H hidden, HQ query heads, HKV key/value heads, D head dimension, HK and HV key
and value heads of a Gated DeltaNet layer with dimensions K and V, C = 2*HK*K + HV*V convolution channels, E
experts, I intermediate width, P tokens already in the cache.
"""
