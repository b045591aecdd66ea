//! Compiles the protobuf files with `protox`, so that `protoc` is not required.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["proto/aitk/v1/aitk.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    Ok(())
}
