//! Compiles the kernels for NVIDIA GPUs (`src/cuda_kernels`) to PTX, if the engine is built with CUDA.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    compile_kernels();
}

#[cfg(feature = "cuda")]
fn compile_kernels() {
    use std::path::PathBuf;

    println!("cargo::rerun-if-changed=src/cuda_kernels");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("kernels.rs");
    let compiled = cudaforge::KernelBuilder::new()
        .source_dir("src/cuda_kernels")
        .arg("-std=c++17")
        .arg("-O3")
        .build_ptx()
        .and_then(|kernels| kernels.write(&out));
    if let Err(error) = compiled {
        println!("cargo::error=the CUDA kernels cannot be compiled: {error}");
    }
}
