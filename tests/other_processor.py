"""Environment of a run whose kernels are compiled for a processor without AVX-512."""

HASWELL = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+sse4.2,+popcnt,+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe",
}
