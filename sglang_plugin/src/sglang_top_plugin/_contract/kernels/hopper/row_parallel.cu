// The row-parallel product of bfloat16 operands on sm_90a: K in equal segments, each an fp32 sum over K ascending by
// wgmma (64 rows, 16 of K), the segments added in a balanced binary tree over adjacent pairs, one rounding or none.
//
// Forms with the same bits: `many` walks a tile's segments in one program, with the pending sums in registers and, for
// the highest level, in shared memory; the others share them out over the programs of a cluster, which send each other
// their sums.
//
// Compiled with SEGMENTS (1, 2, 4, 8: how many this rank holds), OUT_BF16 (1: rounded once, 0: fp32), STAGE_K (of K a
// stage), MANY_STAGES, MANY_CLUSTER (programs), and FORMS, the other forms as SHARED_OUT(name, row groups, columns,
// segments a program, stages).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    u64 words[16];
};

constexpr int K_STEP = STAGE_K;
constexpr int WARPGROUP = 128;

extern __shared__ __align__(1024) unsigned char memory[];

#if OUT_BF16
typedef u16 Out;
#else
typedef float Out;
#endif

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- barriers between the thread that loads and the warpgroups that multiply (a waiter asks for a phase's parity)

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void load_tile(const TensorMap* map, u32 target, u32 barrier, int k, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            target),
        "l"(map), "r"(barrier), "r"(k), "r"(row)
        : "memory");
}

// The same tile into the memory of every program of the cluster named in `programs`, at the same place in each.
__device__ __forceinline__ void load_tile_for(const TensorMap* map, u32 target, u32 barrier, int k, int row,
                                              u16 programs) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(k), "r"(row), "h"(programs)
        : "memory");
}

__device__ __forceinline__ void store_tile(const TensorMap* map, u32 source, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(source),
                 "r"(column), "r"(row)
                 : "memory");
}

// A map's 128 bytes, before the first load needs them.
__device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- the cluster

__device__ __forceinline__ u32 in_program(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_program(barrier, rank)) : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void group_barrier(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// ---- the tensor core

// K-major tile with rows of 128 bytes, 128-byte swizzle: 8 rows are 1,024 bytes apart
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N>
__device__ __forceinline__ void keep(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#define F4(b) "+f"(sum[b]), "+f"(sum[b + 1]), "+f"(sum[b + 2]), "+f"(sum[b + 3])
#define F8(b) F4(b), F4(b + 4)

__device__ __forceinline__ void multiply(float (&sum)[32], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;\n}\n"
        : F8(0), F8(8), F8(16), F8(24)
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply(float (&sum)[64], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0;\n}\n"
        : F8(0), F8(8), F8(16), F8(24), F8(32), F8(40), F8(48), F8(56)
        : "l"(a), "l"(b), "r"(accumulate));
}

// ---- one ring of stages in shared memory

// PROGRAMS: how many programs of a cluster read what one of them loads.
template <int STAGES, int A_BYTES, int B_BYTES, int PROGRAMS>
struct Ring {
    static constexpr int BYTES = STAGES * (A_BYTES + B_BYTES);

    u32 tiles;     // STAGES times (A, B), each a multiple of 1,024 bytes
    u32 barriers;  // STAGES times full, STAGES times empty
    int stage = 0;
    u32 phase = 0;
    int reading = 0;  // the stage that products in flight read

    __device__ __forceinline__ u32 a() const { return tiles + stage * (A_BYTES + B_BYTES); }
    __device__ __forceinline__ u32 b() const { return a() + A_BYTES; }
    __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
    __device__ __forceinline__ u32 empty(int of) const { return barriers + (STAGES + of) * 8; }
    __device__ __forceinline__ void init(int warps) const {
        for (int of = 0; of < STAGES; ++of) {
            barrier_init(barriers + of * 8, 1);
            barrier_init(empty(of), warps * PROGRAMS);
        }
    }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    // By every warp that multiplies: what it read may be overwritten, by whichever program loads it.
    __device__ __forceinline__ void release() const {
        const u32 lane = threadIdx.x % 32;
        if constexpr (PROGRAMS == 1) {
            if (lane == 0) barrier_arrive(empty(reading));
        } else {
            if (lane < PROGRAMS) barrier_arrive_in(empty(reading), lane);
        }
    }
};

// One step of K. With PENDING, the group of the step before is in flight, and its stage is free after this call.
template <bool PENDING, int N, class R>
__device__ __forceinline__ void step(float (&sum)[N], R& ring, u32 rows, int accumulate) {
    barrier_wait(ring.full(), ring.phase);
    const u64 a = descriptor(ring.a() + rows), b = descriptor(ring.b());
    keep(sum);
    products_begin();
#pragma unroll
    for (int k = 0; k < K_STEP / 16; ++k) multiply(sum, a + 2 * k, b + 2 * k, accumulate | k);
    products_commit();
    keep(sum);
    if constexpr (PENDING) {
        products_wait<1>();
        ring.release();
    }
    ring.reading = ring.stage;
    ring.advance();
}

struct Nothing {
    __device__ __forceinline__ void operator()() const {}
};

// The products of one segment: `steps` steps of K, ascending; its last group is left in flight. PENDING: so was another
// sum's before. `meanwhile` runs beside the products of the first step.
template <bool PENDING, int N, class R, class F = Nothing>
__device__ __forceinline__ void segment(float (&sum)[N], R& ring, int steps, u32 rows, const F& meanwhile = F{}) {
    step<PENDING>(sum, ring, rows, 0);
    meanwhile();
#pragma unroll 2
    for (int at = 1; at < steps; ++at) step<true>(sum, ring, rows, 1);
}

template <int N, class R>
__device__ __forceinline__ void finish(float (&sum)[N], R& ring) {
    products_wait<0>();
    keep(sum);
    ring.release();
}

template <int N>
__device__ __forceinline__ void add(float (&left)[N], const float (&right)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) left[i] = left[i] + right[i];
}

// The sum of COUNT segments in the tree: (s0 + s1) + (s2 + s3), and so on. Left halves wait in registers; for the left
// half of STACKED segments there are none, and it waits in `stack`, where this thread's vector i lies at i * WARPGROUP.
template <int COUNT, int STACKED, int N, class R, class F>
__device__ __forceinline__ void subtree(float (&sum)[N], R& ring, int steps, u32 rows, float4* stack,
                                        F& stack_is_free) {
    if constexpr (COUNT == 1) {
        segment<false>(sum, ring, steps, rows);
        finish(sum, ring);
    } else if constexpr (COUNT == 2) {
        float right[N];
        segment<false>(sum, ring, steps, rows);
        segment<true>(right, ring, steps, rows);
        finish(right, ring);
        keep(sum);
        add(sum, right);
    } else if constexpr (COUNT == 4 && COUNT != STACKED) {
        float left[N], right[N];
        segment<false>(left, ring, steps, rows);
        segment<true>(right, ring, steps, rows);
        finish(right, ring);
        keep(left);
        segment<false>(sum, ring, steps, rows, [&] { add(left, right); });
        segment<true>(right, ring, steps, rows);
        finish(right, ring);
        keep(sum);
        add(sum, right);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = left[i] + sum[i];
    } else {
        subtree<COUNT / 2, STACKED>(sum, ring, steps, rows, stack, stack_is_free);
        stack_is_free();
#pragma unroll
        for (int i = 0; i < N; i += 4)
            stack[i / 4 * WARPGROUP] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
        subtree<COUNT / 2, STACKED>(sum, ring, steps, rows, stack, stack_is_free);
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 left = stack[i / 4 * WARPGROUP];
            sum[i] = left.x + sum[i];
            sum[i + 1] = left.y + sum[i + 1];
            sum[i + 2] = left.z + sum[i + 2];
            sum[i + 3] = left.w + sum[i + 3];
        }
    }
}

__device__ __forceinline__ u32 rounded_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- many rows: 128 x 128 tiles, two warpgroups that multiply and one thread that loads, tiles one after the other

constexpr int TILE = 128, MANY_BYTES = TILE * K_STEP * 2, MANY_PROGRAMS = MANY_CLUSTER;
constexpr int MANY_THREADS = 3 * WARPGROUP;
constexpr int STACK_BYTES = 64 * WARPGROUP * 4;  // of one warpgroup
constexpr int BOX_BYTES = 64 * 128;              // of the output: 64 rows of 128 bytes
constexpr int BOX_COLUMNS = 128 / sizeof(Out);
using ManyRing = Ring<MANY_STAGES, MANY_BYTES, MANY_BYTES, MANY_PROGRAMS>;

// Which tile: two programs of a cluster have tiles below each other; bands of BAND such pairs, so that neighbouring
// clusters share operands in the second-level cache.
constexpr int BAND = 8;

__device__ __forceinline__ void place(int pair, int pairs_m, int tiles_n, u32 rank, int& row, int& column) {
    const int band = pair / (BAND * tiles_n), within = pair % (BAND * tiles_n);
    const int height = min(pairs_m - band * BAND, BAND);
    row = ((band * BAND + within % height) * MANY_PROGRAMS + rank) * TILE;
    column = (within / height) * TILE;
}

extern "C" __global__ __launch_bounds__(MANY_THREADS, 1) void many(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_out, int m, int n, int steps) {
    if (threadIdx.x == WARPGROUP) prefetch(&map_a);
    if (threadIdx.x == 2 * WARPGROUP) prefetch(&map_b);
    const u32 base = shared_address(memory);
    ManyRing ring{base, base + ManyRing::BYTES + 2 * STACK_BYTES};
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARPGROUP;
    const u32 rank = blockIdx.x % MANY_PROGRAMS;
    if (threadIdx.x == 0) {
        ring.init(2 * WARPGROUP / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    const int pairs_m = (m + MANY_PROGRAMS * TILE - 1) / (MANY_PROGRAMS * TILE), tiles_n = (n + TILE - 1) / TILE;
    const int pairs = pairs_m * tiles_n, stride = gridDim.x / MANY_PROGRAMS;
    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (lane == 0) {
            constexpr int SHARE = TILE / MANY_PROGRAMS;  // of the columns' tile: each program loads one for all
            ring.phase = 1;                              // an empty ring is free
            for (int pair = blockIdx.x / MANY_PROGRAMS; pair < pairs; pair += stride) {
                int row, column;
                place(pair, pairs_m, tiles_n, rank, row, column);
                for (int step = 0; step < SEGMENTS * steps; ++step) {
                    barrier_wait(ring.empty(ring.stage), ring.phase);
                    barrier_expect(ring.full(), 2 * MANY_BYTES);
                    load_tile(&map_a, ring.a(), ring.full(), step * K_STEP, row);
                    load_tile_for(&map_b, ring.b() + rank * SHARE * 128, ring.full(), step * K_STEP,
                                  column + rank * SHARE, (1 << MANY_PROGRAMS) - 1);
                    ring.advance();
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        // the stack's memory is the output's on its way out, too
        unsigned char* own = memory + ManyRing::BYTES + warpgroup * STACK_BYTES;
        float4* stack = reinterpret_cast<float4*>(own) + lane;
        auto stack_is_free = [&] {
            if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            group_barrier(warpgroup);
        };
        for (int pair = blockIdx.x / MANY_PROGRAMS; pair < pairs; pair += stride) {
            int row, column;
            place(pair, pairs_m, tiles_n, rank, row, column);
            float sum[64];
            subtree<SEGMENTS, SEGMENTS>(sum, ring, steps, warpgroup * 64 * 128, stack, stack_is_free);
            stack_is_free();
            // a thread holds rows r and r + 8, and of each the columns 8 j + 2 (lane % 4) and the next
            const int first = (lane / 32) * 16 + (lane % 32) / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const int at = first + 8 * half;
                    const float x = sum[4 * j + 2 * half], y = sum[4 * j + 2 * half + 1];
                    const int byte = (8 * j + 2 * (lane % 4)) * sizeof(Out), box = byte / 128, chunk = byte % 128 / 16;
                    unsigned char* to = own + box * BOX_BYTES + at * 128 + ((chunk ^ at % 8) * 16) + byte % 16;
#if OUT_BF16
                    *reinterpret_cast<u32*>(to) = rounded_pair(x, y);
#else
                    *reinterpret_cast<float2*>(to) = make_float2(x, y);
#endif
                }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            group_barrier(warpgroup);
            if (lane == 0 && row + warpgroup * 64 < m) {
                for (int box = 0; box < TILE / BOX_COLUMNS; ++box) {
                    if (column + box * BOX_COLUMNS >= n) break;
                    store_tile(&map_out, shared_address(own) + box * BOX_BYTES, column + box * BOX_COLUMNS,
                               row + warpgroup * 64);
                }
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
            __syncwarp();
        }
        if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    // nobody's barriers go while the other program may still arrive at them
    cluster_arrive();
    cluster_wait();
}

// ---- fewer rows: the segments of a tile are shared out over a cluster

// `bytes` of this program's memory to the same or another program's; `barrier` there counts them.
__device__ __forceinline__ void copy(u32 target, u32 source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "r"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Tiles of GROUPS * 64 rows and WIDTH columns, PER segments a program. A program sends every other one the columns that
// that one adds up, of all rows there are.
template <int GROUPS, int WIDTH, int PER, int STAGES>
struct SharedOut {
    static constexpr int ROWS = GROUPS * 64, PROGRAMS = SEGMENTS / PER, THREADS = GROUPS * WARPGROUP + 32;
    static constexpr int OWNED = WIDTH / PROGRAMS;  // columns of the tile that a program adds up
    static constexpr int SUMS = ROWS * OWNED * 4;   // bytes of them from one program
    using R = Ring<STAGES, ROWS * K_STEP * 2, WIDTH * K_STEP * 2, 1>;
    static_assert(PROGRAMS * SUMS <= R::BYTES, "a program's sums lie where its stages were until they are sent");

    // Where in such a block, in floats, a row's group of eight columns lies: eight rows meet no bank more than twice.
    static __device__ __forceinline__ int place_of(int row, int group) {
        constexpr int GROUP = OWNED / 8;
        return (row * GROUP + (GROUP % 4 == 0 ? group ^ row % 4 : GROUP == 2 ? group ^ row / 2 % 2 : group)) * 8;
    }

    // `a_rows`: how many rows a load of the left operand brings.
    static __device__ __forceinline__ void run(const TensorMap& map_a, const TensorMap& map_b, Out* __restrict__ out,
                                               int m, int n, int steps, int a_rows) {
        if (threadIdx.x == 0) prefetch(&map_a);
        if (threadIdx.x == 32) prefetch(&map_b);
        const u32 base = shared_address(memory), sums = base + R::BYTES, arrived = sums + PROGRAMS * SUMS;
        R ring{base, arrived + 8};
        const int tiles_n = (n + WIDTH - 1) / WIDTH;
        const u32 rank = blockIdx.x % PROGRAMS, tile = blockIdx.x / PROGRAMS;
        const int row = (tile / tiles_n) * ROWS, column = (tile % tiles_n) * WIDTH;
        const int rows = min(m - row, ROWS), warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARPGROUP;
        const int loads = PER * steps;
        int loaded = 0;
        auto load = [&] {
            barrier_expect(ring.full(), (a_rows + WIDTH) * K_STEP * 2);
            const int k = (rank * loads + loaded) * K_STEP;
            load_tile(&map_b, ring.b(), ring.full(), k, column);
            load_tile(&map_a, ring.a(), ring.full(), k, row);
            ring.advance();
            ++loaded;
        };
        if (threadIdx.x == GROUPS * WARPGROUP) {
            ring.init(GROUPS * WARPGROUP / 32);
            barrier_init(arrived, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            while (loaded < min(STAGES, loads)) load();
            barrier_expect(arrived, PROGRAMS * rows * OWNED * 4);
        }
        __syncwarp();
        cluster_arrive();
        __syncthreads();
        float sum[WIDTH / 2];
        if (warpgroup == GROUPS) {
            if (lane == 0) {
                ring.phase ^= 1;
                while (loaded < loads) {
                    barrier_wait(ring.empty(ring.stage), ring.phase);
                    load();
                }
            }
            __syncwarp();
        } else {
            Nothing nothing;
            subtree<PER, 0>(sum, ring, steps, warpgroup * 64 * 128, nullptr, nothing);
        }
        cluster_wait();  // every program has begun: its barriers are there
        if (warpgroup < GROUPS) {
            asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * WARPGROUP) : "memory");
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = warpgroup * 64 + (lane / 32) * 16 + (lane % 32) / 4 + 8 * half;
#pragma unroll
                for (int j = 0; j < WIDTH / 8; ++j) {
                    const int owner = 8 * j / OWNED, place = place_of(at, 8 * j % OWNED / 8) + 2 * (lane % 4);
                    *reinterpret_cast<float2*>(memory + owner * SUMS + place * 4) =
                        make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * WARPGROUP) : "memory");
            if (threadIdx.x < PROGRAMS) {
                const u32 owner = threadIdx.x;
                copy(in_program(sums + rank * SUMS, owner), base + owner * SUMS, rows * OWNED * 4,
                     in_program(arrived, owner));
            }
            __syncwarp();
        }
        barrier_wait(arrived, 0);
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        const float* received = reinterpret_cast<const float*>(memory + R::BYTES);
        for (int chunk = threadIdx.x; chunk < rows * (OWNED / 4); chunk += THREADS) {
            const int r = chunk / (OWNED / 4), c = 4 * (chunk % (OWNED / 4)), to = column + rank * OWNED + c;
            if (to >= n) continue;
            const float* first = received + place_of(r, c / 8) + c % 8;
            float4 total[PROGRAMS];
#pragma unroll
            for (int i = 0; i < PROGRAMS; ++i) total[i] = *reinterpret_cast<const float4*>(first + i * (SUMS / 4));
#pragma unroll
            for (int width = 1; width < PROGRAMS; width *= 2)
#pragma unroll
                for (int i = 0; i + width < PROGRAMS; i += 2 * width) total[i] = plus(total[i], total[i + width]);
            Out* at = out + static_cast<u64>(row + r) * n + to;
#if OUT_BF16
            *reinterpret_cast<uint2*>(at) =
                make_uint2(rounded_pair(total[0].x, total[0].y), rounded_pair(total[0].z, total[0].w));
#else
            *reinterpret_cast<float4*>(at) = total[0];
#endif
        }
        __syncwarp();
        cluster_wait();  // every program has what this one sent: its memory may go
    }
};

#define SHARED_OUT(name, groups, width, per, stages)                                                             \
    extern "C" __global__ __launch_bounds__((groups) * WARPGROUP + 32) void name(                                 \
        const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, Out* __restrict__ out,  \
        int m, int n, int steps, int a_rows) {                                                                    \
        constexpr int PER = (per) < SEGMENTS ? (per) : SEGMENTS;                                                  \
        SharedOut<groups, width, PER, stages>::run(map_a, map_b, out, m, n, steps, a_rows);                       \
    }

FORMS
