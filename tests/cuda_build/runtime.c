// CUDA's libraries on a machine without a card, for PyTorch's CUDA build (environment.py compiles this once
// for each of them). Memory of a device is main memory, reserved and touched by nobody until it is written.
// Copies and fills are done when they are asked for, streams and events are done at once, kernels do nothing.
// So what PyTorch does on the host runs as on a card: its allocator, autograd's thread for each device, what
// each operation asks for. Not here: time, streams that run beside each other, cuDNN, graphs, NCCL.
//
// Whatever is not defined in this file, environment.py adds as a function that returns 0 (success).
//
// NO_CARD_DEVICES (1), NO_CARD_BYTES (80 GB) of each, NO_CARD_CAPABILITY (90): what devices there are.
// NO_CARD_VALUES=1: memory is filled with zeros where PyTorch asks for it (values.cpp computes the rest).
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static long setting(const char* name, long otherwise) {
  const char* given = getenv(name);
  return given ? atol(given) : otherwise;
}

static int devices(void) { return (int)setting("NO_CARD_DEVICES", 1); }
static size_t bytes_of_a_device(void) { return (size_t)setting("NO_CARD_BYTES", 80L << 30); }
static int capability(void) { return (int)setting("NO_CARD_CAPABILITY", 90); }

static __thread int current;
static __thread cudaError_t latest;

static cudaError_t failed(cudaError_t code) { return latest = code; }

static void* handle(void) { return calloc(1, sizeof(struct timespec)); }  // an event keeps its time there

// ---- memory -----------------------------------------------------------------------------------------

typedef struct Region {
  char* begin;
  size_t size;
  enum cudaMemoryType type;
  int device, mapped;  // mapped: by this file, not only page-locked
  struct Region* next;
} Region;

enum { MOST_DEVICES = 16 };
static Region* regions;
static size_t taken[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_region(void* begin, size_t size, enum cudaMemoryType type, int mapped) {
  Region* made = malloc(sizeof *made);
  *made = (Region){begin, size, type, current, mapped, regions};
  regions = made;
}

static cudaError_t map(void** out, size_t size, enum cudaMemoryType type) {
  size = size ? (size + 4095) / 4096 * 4096 : 4096;
  int limited = type == cudaMemoryTypeDevice;
  pthread_mutex_lock(&lock);
  *out = limited && taken[current] + size > bytes_of_a_device()
             ? MAP_FAILED
             : mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  int got = *out != MAP_FAILED;
  if (got) {
    add_region(*out, size, type, 1);
    if (limited) taken[current] += size;
  }
  pthread_mutex_unlock(&lock);
  if (got) return cudaSuccess;
  *out = 0;
  return failed(cudaErrorMemoryAllocation);
}

static cudaError_t unmap(void* begin) {
  pthread_mutex_lock(&lock);
  for (Region** at = &regions; *at; at = &(*at)->next) {
    Region* region = *at;
    if (region->begin != begin) continue;
    *at = region->next;
    if (region->type == cudaMemoryTypeDevice) taken[region->device] -= region->size;
    if (region->mapped) munmap(region->begin, region->size);
    free(region);
    break;
  }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** out, size_t size) { return map(out, size, cudaMemoryTypeDevice); }
cudaError_t cudaFree(void* begin) { return begin ? unmap(begin) : cudaSuccess; }
cudaError_t cudaHostAlloc(void** out, size_t size, unsigned flags) {
  return map(out, size, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* begin) { return cudaFree(begin); }

cudaError_t cudaHostRegister(void* begin, size_t size, unsigned flags) {
  pthread_mutex_lock(&lock);
  add_region(begin, size, cudaMemoryTypeHost, 0);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* begin) { return unmap(begin); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  out->type = cudaMemoryTypeUnregistered;
  out->device = cudaInvalidDeviceId;
  pthread_mutex_lock(&lock);
  for (Region* region = regions; region; region = region->next)
    if ((char*)pointer >= region->begin && (char*)pointer < region->begin + region->size) {
      out->type = region->type;
      out->device = region->device;
      out->devicePointer = out->hostPointer = (void*)pointer;
      break;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* left, size_t* all) {
  *all = bytes_of_a_device();
  *left = *all - taken[current];
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, size, kind, 0);
}
cudaError_t cudaMemcpyPeerAsync(
    void* to, int its, const void* from, int other, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void* begin, int value, size_t size, cudaStream_t stream) {
  if (setting("NO_CARD_VALUES", 0)) memset(begin, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* begin, int value, size_t size) { return cudaMemsetAsync(begin, value, size, 0); }

// ---- devices ----------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* out) { return *out = devices(), cudaSuccess; }
cudaError_t cudaGetDevice(int* out) { return *out = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices() || device >= MOST_DEVICES) return failed(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* out, int one, int other) { return *out = 1, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* out) { return *out = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* out) { return *out = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  *least = 0, *most = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
  snprintf(out, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}

enum { // of an H100, which PyTorch and Triton lay kernels out by
  PROCESSORS = 132, WARP = 32, THREADS = 1024, THREADS_OF_A_PROCESSOR = 2048, BLOCKS_OF_A_PROCESSOR = 32,
  REGISTERS = 65536, SHARED = 49152, SHARED_MOST = 232448, SHARED_OF_A_PROCESSOR = 233472,
  GRID = 2147483647, GRID_YZ = 65535, CACHE = 52428800
};

cudaError_t cudaDeviceGetAttribute(int* out, enum cudaDeviceAttr what, int device) {
  static const struct { enum cudaDeviceAttr what; int value; } known[] = {
      {cudaDevAttrMultiProcessorCount, PROCESSORS},
      {cudaDevAttrWarpSize, WARP},
      {cudaDevAttrMaxThreadsPerBlock, THREADS},
      {cudaDevAttrMaxBlockDimX, THREADS},
      {cudaDevAttrMaxBlockDimY, THREADS},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrMaxGridDimX, GRID},
      {cudaDevAttrMaxGridDimY, GRID_YZ},
      {cudaDevAttrMaxGridDimZ, GRID_YZ},
      {cudaDevAttrMaxThreadsPerMultiProcessor, THREADS_OF_A_PROCESSOR},
      {cudaDevAttrMaxBlocksPerMultiprocessor, BLOCKS_OF_A_PROCESSOR},
      {cudaDevAttrMaxRegistersPerBlock, REGISTERS},
      {cudaDevAttrMaxRegistersPerMultiprocessor, REGISTERS},
      {cudaDevAttrMaxSharedMemoryPerBlock, SHARED},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, SHARED_MOST},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, SHARED_OF_A_PROCESSOR},
      {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrL2CacheSize, CACHE},
  };
  *out = what == cudaDevAttrComputeCapabilityMajor   ? capability() / 10
         : what == cudaDevAttrComputeCapabilityMinor ? capability() % 10
                                                     : 0;
  for (size_t at = 0; at < sizeof known / sizeof *known; at++)
    if (known[at].what == what) *out = known[at].value;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* out, int device) {
  *out = (struct cudaDeviceProp){
      .name = "no card", .totalGlobalMem = bytes_of_a_device(), .pciBusID = device,
      .major = capability() / 10, .minor = capability() % 10, .multiProcessorCount = PROCESSORS,
      .warpSize = WARP, .maxThreadsPerBlock = THREADS, .maxThreadsDim = {THREADS, THREADS, 64},
      .maxGridSize = {GRID, GRID_YZ, GRID_YZ}, .maxThreadsPerMultiProcessor = THREADS_OF_A_PROCESSOR,
      .maxBlocksPerMultiProcessor = BLOCKS_OF_A_PROCESSOR, .sharedMemPerBlock = SHARED,
      .sharedMemPerBlockOptin = SHARED_MOST, .sharedMemPerMultiprocessor = SHARED_OF_A_PROCESSOR,
      .regsPerBlock = REGISTERS, .regsPerMultiprocessor = REGISTERS, .l2CacheSize = CACHE,
      .textureAlignment = 512, .memPitch = GRID, .unifiedAddressing = 1, .concurrentKernels = 1,
      .canMapHostMemory = 1, .managedMemory = 1, .asyncEngineCount = 3};
  return cudaSuccess;
}

// ---- streams, events, errors ------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* out) { return *out = handle(), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreate(out); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  return cudaStreamCreate(out);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* out) { return *out = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* out) {
  return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  *out = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return failed(cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  return failed(cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned flags) {
  return function(stream, cudaSuccess, data), cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return function(data), cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* out) { return *out = handle(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) { return cudaEventCreate(out); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  clock_gettime(CLOCK_MONOTONIC, (struct timespec*)event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t first, cudaEvent_t last) {
  struct timespec *begin = (void*)first, *end = (void*)last;
  *out = (end->tv_sec - begin->tv_sec) * 1e3 + (end->tv_nsec - begin->tv_nsec) * 1e-6;
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void) { return latest; }
cudaError_t cudaGetLastError(void) {
  cudaError_t found = latest;
  latest = cudaSuccess;
  return found;
}
const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "out of memory" : "not on a machine without a card";
}
const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorNotSupported";
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** out, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* result) {
  *out = 0;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return failed(cudaErrorSymbolNotFound);
}

// ---- kernels: what is asked before they are started -------------------------------------------------

static __thread struct { dim3 grid, block; size_t shared; void* stream; } launch;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  launch.grid = grid, launch.block = block, launch.shared = shared, launch.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = launch.grid, *block = launch.block, *shared = launch.shared, *(void**)stream = launch.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void* binary) { return handle(); }
cudaError_t __cudaGetKernel(void** out, const void* function) { return *out = (void*)function, cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) { return *out = (void*)symbol, cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* out, const void* function) {
  *out = (struct cudaFuncAttributes){
      .maxThreadsPerBlock = THREADS, .binaryVersion = capability(), .ptxVersion = capability(),
      .numRegs = 32, .maxDynamicSharedSizeBytes = SHARED_MOST};
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* out, const void* function, int block, size_t shared) {
  return *out = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* out, const void* function, int block, size_t shared, unsigned flags) {
  return *out = 2, cudaSuccess;
}
cudaError_t cudaLibraryLoadData(
    cudaLibrary_t* out, const void* code, enum cudaJitOption* options, void** values, unsigned count,
    enum cudaLibraryOption* more, void** their, unsigned number) {
  return *out = handle(), cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* out, cudaLibrary_t library, const char* name) {
  return *out = handle(), cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int device) {
  return *out = handle(), cudaSuccess;
}

// ---- other libraries: what gives something out ------------------------------------------------------

int cublasCreate_v2(void** out) { return *out = handle(), 0; }
int cublasDestroy_v2(void* made) { return free(made), 0; }
int cublasGetMathMode(void* made, int* out) { return *out = 0; }
int cublasGetPointerMode_v2(void* made, int* out) { return *out = 0; }
int cublasLtCreate(void** out) { return *out = handle(), 0; }
int cublasLtMatmulDescCreate(void** out, int compute, int scale) { return *out = handle(), 0; }
int cublasLtMatrixLayoutCreate(
    void** out, int type, unsigned long long rows, unsigned long long columns, long long step) {
  return *out = handle(), 0;
}
int cublasLtMatmulPreferenceCreate(void** out) { return *out = handle(), 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void* made, void* operation, void* a, void* b, void* c, void* d, void* preference, int wanted,
    void* results, int* found) {
  return *found = wanted, 0;
}
int cudnnCreate(void** out) { return *out = handle(), 0; }
int ncclGetVersion(int* out) { return *out = 22907, 0; }
int nvrtcVersion(int* major, int* minor) { return *major = CUDART_VERSION / 1000, *minor = 0; }
int cuptiGetVersion(unsigned* out) { return *out = CUDART_VERSION * 10, 0; }

// ---- the driver, which Triton calls -----------------------------------------------------------------

static char context;
int cuDriverGetVersion(int* out) { return *out = CUDART_VERSION, 0; }
int cuDeviceGet(int* out, int number) { return *out = number, 0; }
int cuDeviceGetCount(int* out) { return *out = devices(), 0; }
int cuDeviceGetAttribute(int* out, int what, int device) { return cudaDeviceGetAttribute(out, what, device); }
int cuCtxGetCurrent(void** out) { return *out = &context, 0; }
int cuCtxGetDevice(int* out) { return *out = current, 0; }
int cuCtxGetLimit(size_t* out, int what) { return *out = 0, 0; }
int cuDevicePrimaryCtxRetain(void** out, int device) { return *out = &context, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* out) { return *flags = 0, *out = 1, 0; }
int cuModuleLoadData(void** out, const void* image) { return *out = handle(), 0; }
int cuModuleGetFunction(void** out, void* module, const char* name) { return *out = handle(), 0; }
int cuFuncGetAttribute(int* out, int what, void* function) {
  return *out = what == 0 ? THREADS : what == 4 ? 32 : 0, 0;  // threads of a block, registers of a thread
}
int cuPointerGetAttribute(void* out, int what, unsigned long long pointer) {
  return *(unsigned long long*)out = pointer, 0;
}
int cuOccupancyMaxActiveClusters(int* out, void* function, const void* settings) { return *out = 1, 0; }
int cuGetErrorString(int code, const char** out) { return *out = "not on a machine without a card", 0; }
