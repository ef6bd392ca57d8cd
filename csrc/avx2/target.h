#ifndef FERMI_AVX2_TARGET_H
#define FERMI_AVX2_TARGET_H

/* Without fma: the compiler must have nothing to contract a product and a sum into. */
#define AVX2 __attribute__((target("avx2,f16c")))

#endif
