/* A CUDA driver that launches nothing: Triton compiles for sm_90 and runs its own launcher, and what is left is the time
 * of the host. It accepts every call that Triton's launcher makes and can record what a kernel would have been given.
 *
 * Sizes of parameters are read from the kernel's binary, as a driver does (EIATTR_KPARAM_INFO in the section .nv.info),
 * so that a record holds the bytes that the GPU would have seen, not what the caller believes to have passed.
 */
#include "cuda.h"
#include <stdlib.h>
#include <string.h>

#define MOST_PARAMETERS 64
#define MOST_RECORDS 1024
#define MOST_BYTES 128 /* the largest parameter: a tensor map */

typedef struct {
    unsigned long long name; /* hash of the binary, which identifies a compiled kernel */
    int count;
    int size[MOST_PARAMETERS];
} Kernel;

typedef struct {
    unsigned long long kernel;
    unsigned long long stream;
    unsigned grid[3];
    unsigned threads;
    unsigned shared;
    int count;
    unsigned long long value[MOST_PARAMETERS]; /* of a tensor map: the hash of its bytes */
} Record;

long stub_launches = 0;
int stub_recording = 0;
int stub_records = 0;
Record stub_record[MOST_RECORDS];
static char context[1];

static unsigned long long hash(const void *bytes, size_t count) {
    unsigned long long h = 14695981039346656037ull; /* FNV-1a */
    for (size_t i = 0; i < count; i++) h = (h ^ ((const unsigned char *)bytes)[i]) * 1099511628211ull;
    return h;
}

static size_t size_of(const unsigned char *elf) { /* section headers are last in what ptxas writes, or program headers */
    unsigned long long sections, segments;
    unsigned short count[5];
    memcpy(&segments, elf + 32, 8), memcpy(&sections, elf + 40, 8), memcpy(count, elf + 54, 10);
    size_t a = sections + count[2] * count[3], b = segments + count[0] * count[1];
    return a > b ? a : b;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    static const unsigned char MARK[4] = {4, 0x17, 12, 0}; /* a sized value, KPARAM_INFO, 12 bytes */
    const unsigned char *elf = image;
    size_t size = size_of(elf);
    Kernel *kernel = calloc(1, sizeof *kernel);
    kernel->name = hash(elf, size);
    for (size_t i = 64; i + 16 <= size; i += 4)
        if (!memcmp(elf + i, MARK, 4)) {
            unsigned short ordinal;
            unsigned flags;
            memcpy(&ordinal, elf + i + 8, 2), memcpy(&flags, elf + i + 12, 4);
            if (ordinal >= MOST_PARAMETERS) return CUDA_ERROR_INVALID_IMAGE;
            kernel->size[ordinal] = flags >> 18;
            if (ordinal >= kernel->count) kernel->count = ordinal + 1;
        }
    *module = (CUmodule)kernel;
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
    (void)name;
    *f = (CUfunction)module;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { (void)module; return CUDA_SUCCESS; } /* records refer to it */

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
    (void)extra;
    stub_launches++;
    if (stub_recording && stub_records < MOST_RECORDS) {
        const Kernel *kernel = (const Kernel *)f;
        Record *r = &stub_record[stub_records++];
        memset(r, 0, sizeof *r);
        r->kernel = kernel->name, r->stream = (unsigned long long)c->hStream;
        r->grid[0] = c->gridDimX, r->grid[1] = c->gridDimY, r->grid[2] = c->gridDimZ;
        r->threads = c->blockDimX, r->shared = c->sharedMemBytes, r->count = kernel->count;
        for (int i = 0; i < kernel->count; i++)
            if (kernel->size[i] > 8) r->value[i] = hash(parameters[i], kernel->size[i]);
            else memcpy(&r->value[i], parameters[i], kernel->size[i]);
    }
    return CUDA_SUCCESS;
}

/* The tensor map holds what it was made from, and is refused where CUDA would refuse it. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    unsigned long long made[16] = {(unsigned long long)address, type, rank, swizzle, fill, interleave, promotion};
    if (rank < 1 || rank > 5 || (unsigned long long)address % 16) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < rank; i++) {
        if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
        made[7] = made[7] * 1099511628211ull + dims[i], made[8] = made[8] * 1099511628211ull + box[i];
        made[9] = made[9] * 1099511628211ull + (i + 1 < rank ? strides[i] : steps[i]);
    }
    memcpy(map, made, sizeof made);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    switch ((int)attribute) { /* an H100's, as far as Triton asks */
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        default: *value = 65536;
    }
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
    (void)f;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    (void)attribute;
    *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "refused by the stub driver";
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction f, const CUlaunchConfig *c) {
    (void)f, (void)c;
    *clusters = 1;
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

/* What only has to succeed. */
CUresult cuInit(unsigned flags) { (void)flags; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { (void)c; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { (void)limit; *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { (void)limit, (void)value; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { (void)d; *c = (CUcontext)context; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { (void)f, (void)a, (void)v; return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { (void)f, (void)c; return CUDA_SUCCESS; }
