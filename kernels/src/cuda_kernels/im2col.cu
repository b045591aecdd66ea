// The inputs of each output pixel of a convolution as a column of a matrix, so that the convolution is a product of matrices.
#include "common.cuh"

// The sizes of a convolution of one image.
struct Sizes {
    int height, width, kernel_h, kernel_w, out_w, first_row, pixels, padding, stride, dilation;
    // Whether the taps are in reverse order, for the gradient of the input.
    int reversed;
};

// x [channels, height, width] -> columns [channels * kernel_h * kernel_w, pixels], where pixel 0 is the first of the output row
// `first_row`. Each thread computes N consecutive pixels of a row of the matrix; N divides `pixels`.
template <typename T, int N> __device__ void im2col(const T *x, T *columns, int64_t count, const Sizes &sizes) {
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= count) {
        return;
    }
    const int64_t row = i / sizes.pixels;
    const int pixel = (int)(i - row * sizes.pixels);
    const int taps = sizes.kernel_h * sizes.kernel_w;
    const int channel = (int)(row / taps);
    int tap = (int)(row - (int64_t)channel * taps);
    if (sizes.reversed) {
        tap = taps - 1 - tap;
    }
    const int below = tap / sizes.kernel_w * sizes.dilation - sizes.padding;
    const int right = tap % sizes.kernel_w * sizes.dilation - sizes.padding;
    const T *plane = x + (int64_t)channel * sizes.height * sizes.width;
    int out_row = sizes.first_row + pixel / sizes.out_w, out_column = pixel % sizes.out_w;
    Elements<T, N> out;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int h = out_row * sizes.stride + below, w = out_column * sizes.stride + right;
        const bool is_inside = h >= 0 && h < sizes.height && w >= 0 && w < sizes.width;
        out.at[k] = is_inside ? plane[(int64_t)h * sizes.width + w] : from_float<T>(0.0f);
        if (++out_column == sizes.out_w) {
            out_column = 0;
            out_row++;
        }
    }
    store<T, N>(columns + i, out);
}

#define KERNELS(T, N)                                                                                                  \
    extern "C" __global__ void im2col_##T##_##N(const T *x, T *columns, int64_t count, int height, int width,          \
                                                int kernel_h, int kernel_w, int out_w, int first_row, int pixels,      \
                                                int padding, int stride, int dilation, int reversed) {                 \
        im2col<T, N>(x, columns, count,                                                                                \
                     Sizes{height, width, kernel_h, kernel_w, out_w, first_row, pixels, padding, stride, dilation,     \
                           reversed});                                                                                 \
    }

KERNELS(f32, 1)
KERNELS(f32, 4)
KERNELS(f16, 1)
KERNELS(f16, 8)
KERNELS(bf16, 1)
KERNELS(bf16, 8)
