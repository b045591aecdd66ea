// Softmax over rows of attention scores, and its gradient. One block computes one row.
#include "common.cuh"

struct Row {
    float max;
    // 1 / sum of exp(x - max); 0 for a row of only minus infinity, which becomes zeros.
    float scale;
};

// The maximum and the sum in one pass: a sum is rescaled when the maximum grows.
template <typename S, int N> __device__ __forceinline__ Row measure(const S *scores, int keys) {
    float max = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x * N; i < keys; i += blockDim.x * N) {
        const Elements<S, N> x = load<S, N>(scores + i);
        float most = max;
#pragma unroll
        for (int k = 0; k < N; k++) {
            most = Max::of(to_float(x.at[k]), most);
        }
        if (most == -INFINITY) {
            continue;
        }
        sum *= expf(max - most);
        max = most;
#pragma unroll
        for (int k = 0; k < N; k++) {
            sum += expf(to_float(x.at[k]) - max);
        }
    }
    const float most = reduce<Max>(max);
    sum = reduce<Sum>(max == -INFINITY ? 0.0f : sum * expf(max - most));
    return Row{most, most == -INFINITY ? 0.0f : 1.0f / sum};
}

__device__ __forceinline__ float probability(const Row &row, float score) {
    return row.scale == 0.0f ? 0.0f : expf(score - row.max) * row.scale;
}

// scores [rows, keys] -> probabilities [rows, keys].
template <typename S, typename O, int N> __device__ void softmax(const S *scores, O *probabilities, int keys) {
    scores += (int64_t)blockIdx.x * keys;
    probabilities += (int64_t)blockIdx.x * keys;
    const Row row = measure<S, N>(scores, keys);
    for (int i = threadIdx.x * N; i < keys; i += blockDim.x * N) {
        const Elements<S, N> x = load<S, N>(scores + i);
        Elements<O, N> y;
#pragma unroll
        for (int k = 0; k < N; k++) {
            y.at[k] = from_float<O>(probability(row, to_float(x.at[k])));
        }
        store<O, N>(probabilities + i, y);
    }
}

// With the gradient dp of the probabilities p: ds = p * (dp - sum(p * dp)); and p again.
template <typename S, typename O, int N>
__device__ void softmax_backward(const S *scores, const O *dp, O *probabilities, S *ds, int keys) {
    const int64_t at = (int64_t)blockIdx.x * keys;
    scores += at;
    dp += at;
    probabilities += at;
    ds += at;
    const Row row = measure<S, N>(scores, keys);
    float sum = 0.0f;
    for (int i = threadIdx.x * N; i < keys; i += blockDim.x * N) {
        const Elements<S, N> x = load<S, N>(scores + i);
        const Elements<O, N> d = load<O, N>(dp + i);
#pragma unroll
        for (int k = 0; k < N; k++) {
            sum += probability(row, to_float(x.at[k])) * to_float(d.at[k]);
        }
    }
    sum = reduce<Sum>(sum);
    for (int i = threadIdx.x * N; i < keys; i += blockDim.x * N) {
        const Elements<S, N> x = load<S, N>(scores + i);
        const Elements<O, N> d = load<O, N>(dp + i);
        Elements<O, N> y;
        Elements<S, N> dx;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float p = probability(row, to_float(x.at[k]));
            y.at[k] = from_float<O>(p);
            dx.at[k] = from_float<S>(p * (to_float(d.at[k]) - sum));
        }
        store<O, N>(probabilities + i, y);
        store<S, N>(ds + i, dx);
    }
}

#define KERNELS(S, O, N)                                                                                               \
    extern "C" __global__ void softmax_##S##_##O##_##N(const S *scores, O *probabilities, int keys) {                  \
        softmax<S, O, N>(scores, probabilities, keys);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void softmax_backward_##S##_##O##_##N(const S *scores, const O *dp, O *probabilities, S *ds, \
                                                                int keys) {                                           \
        softmax_backward<S, O, N>(scores, dp, probabilities, ds, keys);                                                \
    }

KERNELS(f32, f32, 1)
KERNELS(f32, f32, 4)
KERNELS(f16, f16, 1)
KERNELS(f16, f16, 8)
KERNELS(bf16, bf16, 1)
KERNELS(bf16, bf16, 8)
KERNELS(f32, f16, 1)
KERNELS(f32, f16, 4)
KERNELS(f32, bf16, 1)
KERNELS(f32, bf16, 4)
