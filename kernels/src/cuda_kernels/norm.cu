// Group norm, layer norm and RMS norm, and the gradient of their input. One block computes one row.
#include "common.cuh"

// A row has `length` elements. Element i of row r belongs to channel r % groups * (length / spatial) + i / spatial.
struct Shape {
    int length, groups, spatial;
    float eps;
    // 0: the mean is not subtracted, and there is no bias.
    int subtract_mean;
    // 1: SiLU of the result.
    int with_silu;
};

struct Statistics {
    float mean, scale;
};

template <typename T, int N> __device__ __forceinline__ Statistics measure(const T *x, const Shape &shape) {
    float mean = 0.0f;
    if (shape.subtract_mean) {
        float sum = 0.0f;
        for (int i = threadIdx.x * N; i < shape.length; i += blockDim.x * N) {
            const Elements<T, N> some = load<T, N>(x + i);
#pragma unroll
            for (int k = 0; k < N; k++) {
                sum += to_float(some.at[k]);
            }
        }
        mean = reduce<Sum>(sum) / shape.length;
    }
    float squares = 0.0f;
    for (int i = threadIdx.x * N; i < shape.length; i += blockDim.x * N) {
        const Elements<T, N> some = load<T, N>(x + i);
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float centred = to_float(some.at[k]) - mean;
            squares += centred * centred;
        }
    }
    return Statistics{mean, 1.0f / sqrtf(reduce<Sum>(squares) / shape.length + shape.eps)};
}

// The channel of element i, and whether the next N - 1 elements have the same channel.
template <int N> struct Channels {
    int first;
    bool is_one;

    __device__ __forceinline__ Channels(const Shape &shape, int row_start, int i) {
        is_one = shape.spatial % N == 0;
        first = row_start + (shape.spatial == 1 ? i : i / shape.spatial);
    }

    __device__ __forceinline__ int of(const Shape &shape, int row_start, int i, int k) const {
        return is_one ? first : row_start + (i + k) / shape.spatial;
    }
};

template <typename T, typename W, int N>
__device__ void norm(const T *x, const W *weight, const W *bias, T *y, const Shape &shape) {
    x += (int64_t)blockIdx.x * shape.length;
    y += (int64_t)blockIdx.x * shape.length;
    const Statistics row = measure<T, N>(x, shape);
    const int start = blockIdx.x % shape.groups * (shape.length / shape.spatial);
    for (int i = threadIdx.x * N; i < shape.length; i += blockDim.x * N) {
        const Elements<T, N> some = load<T, N>(x + i);
        const Channels<N> channels(shape, start, i);
        Elements<T, N> out;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int channel = channels.of(shape, start, i, k);
            float value = (to_float(some.at[k]) - row.mean) * row.scale * to_float(weight[channel]);
            if (shape.subtract_mean) {
                value += to_float(bias[channel]);
            }
            out.at[k] = from_float<T>(shape.with_silu ? activation_value(SILU, value) : value);
        }
        store<T, N>(y + i, out);
    }
}

// dx = scale * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight; without mean(g) if the mean is not subtracted.
template <typename T, typename W, int N>
__device__ void norm_backward(const T *x, const W *weight, const W *bias, const T *dy, T *dx, const Shape &shape) {
    const int64_t at = (int64_t)blockIdx.x * shape.length;
    x += at;
    dy += at;
    dx += at;
    const Statistics row = measure<T, N>(x, shape);
    const int start = blockIdx.x % shape.groups * (shape.length / shape.spatial);
    // g and xhat of element i + k.
    auto gradient = [&](const Elements<T, N> &some, const Elements<T, N> &d, int channel, int k, float &normalised) {
        normalised = (to_float(some.at[k]) - row.mean) * row.scale;
        const float w = to_float(weight[channel]);
        float g = to_float(d.at[k]);
        if (shape.with_silu) {
            const float value = normalised * w + (shape.subtract_mean ? to_float(bias[channel]) : 0.0f);
            g *= activation_derivative(SILU, value);
        }
        return g * w;
    };
    float sum = 0.0f, products = 0.0f;
    for (int i = threadIdx.x * N; i < shape.length; i += blockDim.x * N) {
        const Elements<T, N> some = load<T, N>(x + i), d = load<T, N>(dy + i);
        const Channels<N> channels(shape, start, i);
#pragma unroll
        for (int k = 0; k < N; k++) {
            float normalised;
            const float g = gradient(some, d, channels.of(shape, start, i, k), k, normalised);
            sum += g;
            products += g * normalised;
        }
    }
    const float mean = shape.subtract_mean ? reduce<Sum>(sum) / shape.length : 0.0f;
    const float mean_product = reduce<Sum>(products) / shape.length;
    for (int i = threadIdx.x * N; i < shape.length; i += blockDim.x * N) {
        const Elements<T, N> some = load<T, N>(x + i), d = load<T, N>(dy + i);
        const Channels<N> channels(shape, start, i);
        Elements<T, N> out;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float normalised;
            const float g = gradient(some, d, channels.of(shape, start, i, k), k, normalised);
            out.at[k] = from_float<T>((g - mean - normalised * mean_product) * row.scale);
        }
        store<T, N>(dx + i, out);
    }
}

#define KERNELS(T, W, N)                                                                                               \
    extern "C" __global__ void norm_##T##_##W##_##N(const T *x, const W *weight, const W *bias, T *y, int length,      \
                                                    int groups, int spatial, float eps, int subtract_mean,             \
                                                    int with_silu) {                                                  \
        norm<T, W, N>(x, weight, bias, y, Shape{length, groups, spatial, eps, subtract_mean, with_silu});             \
    }                                                                                                                  \
    extern "C" __global__ void norm_backward_##T##_##W##_##N(const T *x, const W *weight, const W *bias, const T *dy,  \
                                                             T *dx, int length, int groups, int spatial, float eps,    \
                                                             int subtract_mean, int with_silu) {                      \
        norm_backward<T, W, N>(x, weight, bias, dy, dx,                                                                \
                               Shape{length, groups, spatial, eps, subtract_mean, with_silu});                        \
    }

KERNELS(f32, f32, 1)
KERNELS(f32, f32, 4)
KERNELS(f16, f16, 1)
KERNELS(f16, f16, 8)
KERNELS(bf16, bf16, 1)
KERNELS(bf16, bf16, 8)
KERNELS(f16, f32, 1)
KERNELS(f16, f32, 8)
KERNELS(bf16, f32, 1)
KERNELS(bf16, f32, 8)
