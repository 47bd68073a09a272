#include "kernels/kernels.h"

#include <cstdlib>
#include <cstring>

#ifdef LFMFAST_KERNELS_X86
#ifdef _MSC_VER
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#ifdef LFMFAST_KERNELS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(LFMFAST_KERNELS_ARM)
#ifdef __APPLE__
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include <windows.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace lfmfast::kernels {

namespace {

#ifdef LFMFAST_KERNELS_X86

struct registers {
    uint32_t eax, ebx, ecx, edx;
};

registers cpuid(uint32_t leaf, uint32_t subleaf) {
    registers r = {};
#ifdef _MSC_VER
    int out[4];
    __cpuid(out, 0);
    if (static_cast<uint32_t>(out[0]) < leaf) return r;
    __cpuidex(out, static_cast<int>(leaf), static_cast<int>(subleaf));
    memcpy(&r, out, sizeof(r));
#else
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
#endif
    return r;
}

// Which register states the operating system saves.
uint64_t saved_states() {
    if (!(cpuid(1, 0).ecx >> 27 & 1)) return 0;
#ifdef _MSC_VER
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
#endif
}

// Linux saves AMX's tiles only for a process that asked for it.
bool may_use_tiles(uint64_t saved) {
#ifdef LFMFAST_KERNELS_AMX
    constexpr int request = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return (saved & 0x60000) == 0x60000 && syscall(SYS_arch_prctl, request, tiles) == 0;
#else
    (void) saved;
    return false;
#endif
}

struct x86_features {
    bool avx2, avxvnni, avx512vnni, amx;

    x86_features() {
        const registers one = cpuid(1, 0), seven = cpuid(7, 0);
        const uint64_t  saved = saved_states();
        const auto      has   = [](uint32_t r, int bit) { return (r >> bit & 1) != 0; };
        avx2 = (saved & 0x6) == 0x6 && has(one.ecx, 12) && has(one.ecx, 29) && has(seven.ebx, 5);  // FMA, F16C, AVX2
        avxvnni    = avx2 && seven.eax >= 1 && has(cpuid(7, 1).eax, 4);
        avx512vnni = avx2 && (saved & 0xe6) == 0xe6 && has(seven.ebx, 16) && has(seven.ebx, 17) && has(seven.ebx, 30) &&
                     has(seven.ebx, 31) && has(seven.ecx, 11);  // F, DQ, BW, VL, VNNI
        amx = avx512vnni && has(seven.edx, 24) && has(seven.edx, 25) && may_use_tiles(saved);  // TILE, INT8
    }
};

#elif defined(LFMFAST_KERNELS_ARM)

struct arm_features {
    bool dotprod, i8mm;

    arm_features() {
#ifdef __APPLE__
        const auto has = [](const char * name) {
            int    value = 0;
            size_t size  = sizeof(value);
            return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
        };
        dotprod = has("hw.optional.arm.FEAT_DotProd");
        i8mm    = dotprod && has("hw.optional.arm.FEAT_I8MM");
#elif defined(_WIN32)
        dotprod = IsProcessorFeaturePresent(43) != 0;             // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
        i8mm    = dotprod && IsProcessorFeaturePresent(66) != 0;  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
#else
        dotprod = (getauxval(AT_HWCAP) >> 20 & 1) != 0;              // HWCAP_ASIMDDP
        i8mm    = dotprod && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;  // HWCAP2_I8MM
#endif
    }
};

#endif

struct set_list {
    const kernel_set * sets[5] = {};

    set_list() {
#ifdef LFMFAST_KERNELS_X86
        const x86_features cpu;
        int                n = 0;
#ifdef LFMFAST_KERNELS_AMX
        if (cpu.amx) sets[n++] = &amx;
#endif
        if (cpu.avx512vnni) sets[n++] = &avx512vnni;
#ifdef LFMFAST_KERNELS_AVXVNNI
        if (cpu.avxvnni) sets[n++] = &avxvnni;
#endif
        if (cpu.avx2) sets[n++] = &avx2;
#elif defined(LFMFAST_KERNELS_ARM)
        const arm_features cpu;
        int                n = 0;
        if (cpu.i8mm) sets[n++] = &i8mm;
        if (cpu.dotprod) sets[n++] = &dotprod;
#endif
    }
};

}  // namespace

const kernel_set * const * available() {
    static const set_list list;
    return list.sets;
}

const kernel_set * active() {
    const char * wanted = getenv("LFMFAST_KERNELS");
    if (!wanted || !*wanted || !strcmp(wanted, "1")) return available()[0];
    for (const kernel_set * const * set = available(); *set; ++set) {
        if (!strcmp((*set)->name, wanted)) return *set;
    }
    return nullptr;
}

}  // namespace lfmfast::kernels
