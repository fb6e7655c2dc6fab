// The contract's tree over the ranks of one host, for few rows: every rank writes its fp32 sums into the others' memory
// and adds all of them in rank order as a balanced binary tree over adjacent pairs, with one rounding to bfloat16.
//
// A rank's buffer holds, for each block of this kernel: a counter of its calls, a word for each other rank that says
// which call that rank's values are of, and room for those values, twice. A block is its peers' block of the same index
// and no other's. It may write into the half it used two calls ago: its peer's word of the call between was sent after
// that peer had read it. Nothing here depends on when a kernel runs, so a CUDA graph may replay it.
//
// Compiled with BLOCKS (of a rank's buffer), REGION (fp32 values a block and call).

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int WORDS = 32;  // 128 bytes a block, so that no two blocks poll one line

// A rank's buffer: counters [BLOCKS][WORDS], arrived [BLOCKS][WORDS], values [2][ranks][BLOCKS][REGION].
__device__ __forceinline__ u32* counter(char* buffer, int block) {
    return reinterpret_cast<u32*>(buffer) + block * WORDS;
}

__device__ __forceinline__ u32* arrived(char* buffer, int block, int from) {
    return reinterpret_cast<u32*>(buffer) + (BLOCKS + block) * WORDS + from;
}

template <int RANKS>
__device__ __forceinline__ float* values(char* buffer, u32 call, int from, int block) {
    const size_t place = (static_cast<size_t>(call & 1) * RANKS + from) * BLOCKS + block;
    return reinterpret_cast<float*>(buffer + sizeof(u32) * 2 * BLOCKS * WORDS) + place * REGION;
}

__device__ __forceinline__ u32 bfloat16_bits(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

template <int RANKS>
__device__ __forceinline__ float tree(float (&part)[RANKS]) {
#pragma unroll
    for (int width = RANKS; width > 1; width /= 2)
#pragma unroll
        for (int i = 0; i < width / 2; ++i) part[i] = part[2 * i] + part[2 * i + 1];
    return part[0];
}

// own: this rank's buffer, buffer: every rank's; count: values of the whole sum, a multiple of 4; share: values a block,
// a multiple of 4, at most REGION
template <int RANKS>
__device__ __forceinline__ void peer_sum(
    const float4* partial, uint2* out, char* const (&buffer)[8], char* own, int rank, int count, int share) {
    const int block = blockIdx.x, thread = threadIdx.x, threads = blockDim.x;
    __shared__ u32 shared_call;
    if (thread == 0) shared_call = *counter(own, block) + 1;
    __syncthreads();
    const u32 call = shared_call;
    const int first = block * share / 4, length = min(share, count - block * share) / 4;

    for (int i = thread; i < length; i += threads) {
        const float4 value = partial[first + i];
#pragma unroll
        for (int peer = 0; peer < RANKS; ++peer)
            if (peer != rank) reinterpret_cast<float4*>(values<RANKS>(buffer[peer], call, rank, block))[i] = value;
    }
    __syncthreads();
    // a thread a peer
    char* peer = nullptr;
#pragma unroll
    for (int i = 0; i < RANKS; ++i)
        if (i == thread && i != rank) peer = buffer[i];
    if (peer != nullptr) {
        // the fence orders what all threads of the block have written before the word
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(arrived(peer, block, rank)), "r"(call) : "memory");
        u32 seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(arrived(own, block, thread))
                         : "memory");
        } while (static_cast<int>(seen - call) < 0);  // a peer may be one call ahead
    }
    if (thread == 0) *counter(own, block) = call;
    __syncthreads();

    for (int i = thread; i < length; i += threads) {
        float x[RANKS], y[RANKS], z[RANKS], w[RANKS];
#pragma unroll
        for (int from = 0; from < RANKS; ++from) {
            const float4* sums = from == rank
                ? partial + first
                : reinterpret_cast<const float4*>(values<RANKS>(own, call, from, block));
            const float4 value = sums[i];
            x[from] = value.x, y[from] = value.y, z[from] = value.z, w[from] = value.w;
        }
        out[first + i] = make_uint2(
            bfloat16_bits(tree(x)) | bfloat16_bits(tree(y)) << 16, bfloat16_bits(tree(z)) | bfloat16_bits(tree(w)) << 16);
    }
}

#define PEER_SUM(RANKS)                                                                                               \
    extern "C" __global__ void peer_sum_##RANKS(                                                                      \
        const float4* partial, uint2* out, char* b0, char* b1, char* b2, char* b3, char* b4, char* b5, char* b6,      \
        char* b7, char* own, int rank, int count, int share) {                                                        \
        char* const buffer[8] = {b0, b1, b2, b3, b4, b5, b6, b7};                                                     \
        peer_sum<RANKS>(partial, out, buffer, own, rank, count, share);                                               \
    }

PEER_SUM(2)
PEER_SUM(4)
PEER_SUM(8)
