"""SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

Pure Python.
"""

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15  # by which the generator's counter advances


def mixed(bits):
    """Well mixed bits of every number of a uint64 array; a bijection."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
