/* Whatever the compiler's baseline has: SSE2 on x86-64, NEON on 64-bit ARM. */
#define ISA(name) name##_plain
#include "isa.h"
