// Functions of each element: activations, gated activations, modulation, biases, rotary embeddings. Each thread computes N elements.
#include "common.cuh"

#define FOR_MY_ELEMENTS(i, count)                                                                                      \
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;                                            \
    if (i >= count)                                                                                                    \
        return;

template <typename T, int N> __device__ void activate(const T *x, T *y, int64_t count, int activation) {
    FOR_MY_ELEMENTS(i, count)
    const Elements<T, N> some = load<T, N>(x + i);
    Elements<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) {
        out.at[k] = from_float<T>(activation_value(activation, to_float(some.at[k])));
    }
    store<T, N>(y + i, out);
}

template <typename T, int N>
__device__ void activate_backward(const T *x, const T *dy, T *dx, int64_t count, int activation) {
    FOR_MY_ELEMENTS(i, count)
    const Elements<T, N> some = load<T, N>(x + i), d = load<T, N>(dy + i);
    Elements<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) {
        out.at[k] = from_float<T>(to_float(d.at[k]) * activation_derivative(activation, to_float(some.at[k])));
    }
    store<T, N>(dx + i, out);
}

// x [rows, 2 half] = (hidden, gate) -> hidden * activation(gate) [rows, half].
template <typename T, int N> __device__ void gate(const T *x, T *y, int64_t count, int half, int activation) {
    FOR_MY_ELEMENTS(i, count)
    const T *hidden = x + i / half * half + i;
    const Elements<T, N> h = load<T, N>(hidden), g = load<T, N>(hidden + half);
    Elements<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) {
        out.at[k] = from_float<T>(to_float(h.at[k]) * activation_value(activation, to_float(g.at[k])));
    }
    store<T, N>(y + i, out);
}

template <typename T, int N>
__device__ void gate_backward(const T *x, const T *dy, T *dx, int64_t count, int half, int activation) {
    FOR_MY_ELEMENTS(i, count)
    const int64_t at = i / half * half + i;
    const Elements<T, N> h = load<T, N>(x + at), g = load<T, N>(x + at + half), d = load<T, N>(dy + i);
    Elements<T, N> dh, dg;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const float gradient = to_float(d.at[k]), input = to_float(g.at[k]);
        dh.at[k] = from_float<T>(gradient * activation_value(activation, input));
        dg.at[k] = from_float<T>(gradient * to_float(h.at[k]) * activation_derivative(activation, input));
    }
    store<T, N>(dx + at, dh);
    store<T, N>(dx + at + half, dg);
}

// y = x * (offset + scale) + shift, where scale and shift have one vector of `features` for `rows` rows of x. Either may be absent.
template <typename T, int N>
__device__ void modulate(const T *x, const T *scale, const T *shift, T *y, int64_t count, int rows, int features,
                         float offset) {
    FOR_MY_ELEMENTS(i, count)
    const int64_t row = i / features;
    const int64_t at = row / rows * features + (i - row * features);
    const Elements<T, N> some = load<T, N>(x + i);
    Elements<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) {
        float value = to_float(some.at[k]);
        if (scale) {
            value *= offset + to_float(scale[at + k]);
        }
        if (shift) {
            value += to_float(shift[at + k]);
        }
        out.at[k] = from_float<T>(value);
    }
    store<T, N>(y + i, out);
}

// out = x + gate * y, where gate has one vector of `features` for `rows` rows.
template <typename T, int N>
__device__ void gated_residual(const T *x, const T *gate, const T *y, T *out, int64_t count, int rows, int features) {
    FOR_MY_ELEMENTS(i, count)
    const int64_t row = i / features;
    const int64_t at = row / rows * features + (i - row * features);
    const Elements<T, N> first = load<T, N>(x + i), second = load<T, N>(y + i);
    Elements<T, N> sum;
#pragma unroll
    for (int k = 0; k < N; k++) {
        sum.at[k] = from_float<T>(to_float(first.at[k]) + to_float(gate[at + k]) * to_float(second.at[k]));
    }
    store<T, N>(out + i, sum);
}

// x += bias, in place, where element i belongs to channel i / spatial % channels. N divides `spatial`, or `channels` if that is 1.
template <typename T, int N> __device__ void add_bias(T *x, const T *bias, int64_t count, int channels, int spatial) {
    FOR_MY_ELEMENTS(i, count)
    Elements<T, N> some = load<T, N>(x + i);
    const int first = (int)(i / spatial % channels);
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int channel = spatial == 1 ? first + k : first;
        some.at[k] = from_float<T>(to_float(some.at[k]) + to_float(bias[channel]));
    }
    store<T, N>(x + i, some);
}

// Exchanges two axes: rows start..start + count of x [a, all, b, width] -> y [a, b, count, width].
template <typename T, int N>
__device__ void swap_axes(const T *x, T *y, int64_t elements, int all, int start, int count, int b, int width) {
    FOR_MY_ELEMENTS(i, elements)
    const int64_t vector = i / width;
    const int64_t row = vector % count, outer = vector / count;
    const int64_t from = ((outer / b * all + start + row) * b + outer % b) * width + (i - vector * width);
    store<T, N>(y + i, load<T, N>(x + from));
}

// Rotates pairs of features of each head: x [b, positions, heads * 2 half], cos and sin [positions, half]. One thread rotates a pair.
template <typename T, int N>
__device__ void rotate(const T *x, const float *cos, const float *sin, T *y, int64_t pairs, int positions, int heads,
                       int half, int interleaved, float sign) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs)
        return;
    const int pair = (int)(i % half);
    const int64_t head = i / half;
    const int64_t table = head / heads % positions * half + pair;
    const int64_t first = head * 2 * half + (interleaved ? 2 * pair : pair);
    const int64_t second = first + (interleaved ? 1 : half);
    const float a = to_float(x[first]), b = to_float(x[second]), c = cos[table], s = sign * sin[table];
    y[first] = from_float<T>(a * c - b * s);
    y[second] = from_float<T>(b * c + a * s);
}

#define KERNELS(T, N)                                                                                                  \
    extern "C" __global__ void activate_##T##_##N(const T *x, T *y, int64_t count, int activation) {                   \
        activate<T, N>(x, y, count, activation);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void activate_backward_##T##_##N(const T *x, const T *dy, T *dx, int64_t count,              \
                                                           int activation) {                                           \
        activate_backward<T, N>(x, dy, dx, count, activation);                                                         \
    }                                                                                                                  \
    extern "C" __global__ void gate_##T##_##N(const T *x, T *y, int64_t count, int half, int activation) {             \
        gate<T, N>(x, y, count, half, activation);                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void gate_backward_##T##_##N(const T *x, const T *dy, T *dx, int64_t count, int half,        \
                                                       int activation) {                                               \
        gate_backward<T, N>(x, dy, dx, count, half, activation);                                                       \
    }                                                                                                                  \
    extern "C" __global__ void modulate_##T##_##N(const T *x, const T *scale, const T *shift, T *y, int64_t count,     \
                                                  int rows, int features, float offset) {                              \
        modulate<T, N>(x, scale, shift, y, count, rows, features, offset);                                             \
    }                                                                                                                  \
    extern "C" __global__ void gated_residual_##T##_##N(const T *x, const T *gate, const T *y, T *out, int64_t count,  \
                                                        int rows, int features) {                                      \
        gated_residual<T, N>(x, gate, y, out, count, rows, features);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void swap_axes_##T##_##N(const T *x, T *y, int64_t elements, int all, int start, int count,   \
                                                   int b, int width) {                                                 \
        swap_axes<T, N>(x, y, elements, all, start, count, b, width);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void add_bias_##T##_##N(T *x, const T *bias, int64_t count, int channels, int spatial) {     \
        add_bias<T, N>(x, bias, count, channels, spatial);                                                             \
    }

#define KERNELS_OF_PAIRS(T)                                                                                            \
    extern "C" __global__ void rotate_##T##_1(const T *x, const float *cos, const float *sin, T *y, int64_t pairs,     \
                                              int positions, int heads, int half, int interleaved, float sign) {       \
        rotate<T, 1>(x, cos, sin, y, pairs, positions, heads, half, interleaved, sign);                                \
    }

KERNELS(f32, 1)
KERNELS(f32, 4)
KERNELS(f16, 1)
KERNELS(f16, 8)
KERNELS(bf16, 1)
KERNELS(bf16, 8)
KERNELS_OF_PAIRS(f32)
KERNELS_OF_PAIRS(f16)
KERNELS_OF_PAIRS(bf16)
