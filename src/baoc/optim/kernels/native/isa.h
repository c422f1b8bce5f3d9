/* Everything that is compiled once per instruction set; see isa_*.c, which define ISA. No thread code is in here.
 *
 * Products are fused with sums by name and never by the compiler, and sums go through a fixed number of lanes in a fixed
 * order: AVX2 and AVX-512 give the same bits, and plain C, where nothing is fused, the same to rounding. The reference
 * is `baoc/optim/kernels/update.py` with the codecs and mechanisms that it calls; tests compare the two for every
 * configuration.
 */
#include "balance.h"
#include "factors.h"
#include "tile.h"

const kernel ISA(kernel) = {
    ISA(update), ISA(measure), ISA(balance), ISA(absorb), ISA(blend), ISA(read_factor), ISA(normalise), ISA(take_root),
};
