#include "membench.h"

#include "kernels.h"

int membench_isa_supported(int isa) { return kernels_for(isa) != NULL; }

int membench_isa_best(void)
{
    static const int preferred[] = {MEMBENCH_ISA_AVX512, MEMBENCH_ISA_AVX2, MEMBENCH_ISA_SSE2, MEMBENCH_ISA_NEON};
    for (size_t i = 0; i < sizeof preferred / sizeof preferred[0]; i++)
        if (membench_isa_supported(preferred[i]))
            return preferred[i];
    return MEMBENCH_ISA_SCALAR;
}

const char *membench_isa_name(int isa)
{
    switch (isa) {
    case MEMBENCH_ISA_SCALAR: return "scalar";
    case MEMBENCH_ISA_SSE2: return "sse2";
    case MEMBENCH_ISA_AVX2: return "avx2";
    case MEMBENCH_ISA_AVX512: return "avx512";
    case MEMBENCH_ISA_NEON: return "neon";
    default: return "unknown";
    }
}

const char *membench_strerror(int error)
{
    switch (error) {
    case MEMBENCH_OK: return "success";
    case MEMBENCH_E_ARG: return "an argument is out of range";
    case MEMBENCH_E_MAP: return "the memory could not be mapped";
    case MEMBENCH_E_THREAD: return "a thread could not be created";
    case MEMBENCH_E_UNSUPPORTED: return "instruction set, kind of store or method not supported here";
    case MEMBENCH_E_CANCELLED: return "cancelled";
    case MEMBENCH_E_INVALID: return "a result or checksum is wrong";
    case MEMBENCH_E_BUSY: return "the handle is in a run";
    default: return "unknown error";
    }
}
