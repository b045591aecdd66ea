// Steps of Adam and AdamW with moments in float32 or in blocks of 8 bits, and the sum of squares of a gradient.
#include "common.cuh"

// The factors of a step, as in `optim::adamw`.
struct Factors {
    float param_scale, l2_decay, beta2, rest1, rest2, bias_correction, eps, step_size;
};

__device__ __forceinline__ void update(float &p, float g, float &m, float &v, const Factors &factors) {
    g += p * factors.l2_decay;
    m += (g - m) * factors.rest1;
    v = v * factors.beta2 + g * factors.rest2 * g;
    p = p * factors.param_scale + m * factors.step_size / (sqrtf(v) * factors.bias_correction + factors.eps);
}

extern "C" __global__ void adam_f32(float *p, const float *g, float *m, float *v, int64_t count, float param_scale,
                                    float l2_decay, float beta2, float rest1, float rest2, float bias_correction,
                                    float eps, float step_size) {
    const Factors factors{param_scale, l2_decay, beta2, rest1, rest2, bias_correction, eps, step_size};
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        update(p[i], g[i], m[i], v[i], factors);
    }
}

// Scales whose reciprocal would be infinite are multiplied by this first.
constexpr float TINY_SCALE_FACTOR = 1.2676506002282294e30f;
constexpr float MIN_POSITIVE = 1.17549435e-38f;

// The code of a value of each thread, and the scale of the block of 256 values.
__device__ __forceinline__ uint8_t encode(float value, const float *bounds, float &absmax) {
    absmax = reduce<Max>(fabsf(value));
    float first = 1.0f, second = 1.0f;
    if (absmax >= MIN_POSITIVE) {
        second = 1.0f / absmax;
    } else if (absmax > 0.0f) {
        first = TINY_SCALE_FACTOR;
        second = 1.0f / (absmax * TINY_SCALE_FACTOR);
    }
    const float x = value * first * second;
    // The number of bounds below x, by binary search.
    int below = 0;
    for (int step = 128; step > 0; step /= 2) {
        if (bounds[below + step - 1] < x) {
            below += step;
        }
    }
    return (uint8_t)below;
}

// A block of 256 threads computes a block of 256 elements. `tables`: values and bounds of the signed map, then of the unsigned one.
extern "C" __global__ void adam_8bit(float *p, const float *g, uint8_t *m_codes, float *m_absmax, uint8_t *v_codes,
                                     float *v_absmax, const float *tables, int64_t count, float param_scale,
                                     float l2_decay, float beta2, float rest1, float rest2, float bias_correction,
                                     float eps, float step_size) {
    const Factors factors{param_scale, l2_decay, beta2, rest1, rest2, bias_correction, eps, step_size};
    __shared__ float table[1024];
    for (int k = 0; k < 4; k++) {
        table[k * 256 + threadIdx.x] = tables[k * 256 + threadIdx.x];
    }
    __syncthreads();
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    const bool exists = i < count;
    float m = 0.0f, v = 0.0f;
    if (exists) {
        m = table[m_codes[i]] * m_absmax[blockIdx.x];
        v = table[512 + v_codes[i]] * v_absmax[blockIdx.x];
        update(p[i], g[i], m, v, factors);
    }
    float m_scale, v_scale;
    const uint8_t m_code = encode(m, table + 256, m_scale);
    const uint8_t v_code = encode(v, table + 768, v_scale);
    if (exists) {
        m_codes[i] = m_code;
        v_codes[i] = v_code;
    }
    if (threadIdx.x == 0) {
        m_absmax[blockIdx.x] = m_scale;
        v_absmax[blockIdx.x] = v_scale;
    }
}

// A part of the sum of the squares of x for each block.
template <typename T> __device__ void sum_of_squares(const T *x, float *sums, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        const float value = to_float(x[i]);
        sum += value * value;
    }
    sum = reduce<Sum>(sum);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
    }
}

extern "C" __global__ void sum_of_squares_f32(const f32 *x, float *sums, int64_t count) { sum_of_squares(x, sums, count); }
extern "C" __global__ void sum_of_squares_f16(const f16 *x, float *sums, int64_t count) { sum_of_squares(x, sums, count); }
extern "C" __global__ void sum_of_squares_bf16(const bf16 *x, float *sums, int64_t count) { sum_of_squares(x, sums, count); }
