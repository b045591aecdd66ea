//! Names of number formats.

use super::declare::choices;

choices! {
    /// A number format for weights and arithmetic.
    pub enum DType("dtype") {
        /// 32-bit float.
        F32 = "float32" | "float" | "fp32" | "single" | "f32", Works;
        /// 16-bit IEEE float.
        F16 = "float16" | "fp16" | "half" | "f16", Works;
        /// 16-bit brain float.
        BF16 = "bfloat16" | "bf16", Works;
        /// 8-bit float, e4m3.
        F8 = "float8" | "8bit" | "e4m3fn", Refused("8-bit floats come with quantisation");
    }
}

impl DType {
    /// Bytes of one number.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8 => 1,
        }
    }
}
