#ifndef FERMI_SSSE3_TARGET_H
#define FERMI_SSSE3_TARGET_H

#define SSSE3 __attribute__((target("ssse3")))

#endif
