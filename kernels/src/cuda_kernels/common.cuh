// What all kernels use: conversions, vectors of elements, sums over a block, activation functions.
//
// All arithmetic is in float32, whatever the type of the elements. A result does not depend on the order in which blocks run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

typedef __half f16;
typedef __nv_bfloat16 bf16;
typedef float f32;

__device__ __forceinline__ float to_float(f32 x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ f32 from_float<f32>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// N consecutive elements that are read or written at once: up to 16 bytes.
template <typename T, int N> struct alignas(sizeof(T) * N) Elements {
    T at[N];
};

template <typename T, int N> __device__ __forceinline__ Elements<T, N> load(const T *from) {
    return *reinterpret_cast<const Elements<T, N> *>(from);
}

template <typename T, int N> __device__ __forceinline__ void store(T *to, const Elements<T, N> &elements) {
    *reinterpret_cast<Elements<T, N> *>(to) = elements;
}

struct Sum {
    static __device__ __forceinline__ float identity() { return 0.0f; }
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

// NaN is not ignored, as fmaxf does.
struct Max {
    static __device__ __forceinline__ float identity() { return -INFINITY; }
    static __device__ __forceinline__ float of(float a, float b) { return a > b || isnan(a) ? a : b; }
};

// Reduces a value of each thread; every thread gets the result. Blocks have whole warps, at most 32.
template <typename Operation> __device__ __forceinline__ float reduce(float value) {
    __shared__ float of_warp[32];
    for (int distance = 16; distance > 0; distance /= 2) {
        value = Operation::of(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    const int warps = blockDim.x / 32;
    if (warps == 1) {
        return value;
    }
    // The reduction before may still be read.
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = threadIdx.x % 32 < warps ? of_warp[threadIdx.x % 32] : Operation::identity();
    for (int distance = 16; distance > 0; distance /= 2) {
        value = Operation::of(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Numbers of `Activation::kernel_code`.
enum { IDENTITY = 0, SILU = 1, GELU = 2, GELU_TANH = 3, QUICK_GELU = 4 };

constexpr float QUICK_SLOPE = 1.702f;
// 2 sqrt(2 / pi): (1 + tanh u) / 2 is the logistic function of 2 u.
constexpr float TANH_SLOPE = 1.595769121605731f;
constexpr float TANH_CUBE = 0.044715f;

__device__ __forceinline__ float activation_value(int activation, float x) {
    switch (activation) {
    case SILU:
        return x * sigmoid(x);
    case GELU:
        return x * normcdff(x);
    case GELU_TANH:
        return x * sigmoid(TANH_SLOPE * x * (1.0f + TANH_CUBE * x * x));
    case QUICK_GELU:
        return x * sigmoid(QUICK_SLOPE * x);
    default:
        return x;
    }
}

// Of x * s(u(x)) with the logistic function s: s + x * s * (1 - s) * u'.
__device__ __forceinline__ float logistic_slope(float s, float x_slope) { return s + s * (1.0f - s) * x_slope; }

__device__ __forceinline__ float activation_derivative(int activation, float x) {
    switch (activation) {
    case SILU:
        return logistic_slope(sigmoid(x), x);
    case GELU:
        return normcdff(x) + x * 0.3989422804014327f * expf(-0.5f * x * x);
    case GELU_TANH: {
        const float square = x * x;
        const float slope = TANH_SLOPE + 3.0f * TANH_SLOPE * TANH_CUBE * square;
        return logistic_slope(sigmoid(TANH_SLOPE * x * (1.0f + TANH_CUBE * square)), x * slope);
    }
    case QUICK_GELU:
        return logistic_slope(sigmoid(QUICK_SLOPE * x), QUICK_SLOPE * x);
    default:
        return 1.0f;
    }
}
