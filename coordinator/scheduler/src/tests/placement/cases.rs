//! The cases: the job, the device where it runs, and what its explanation says.

use super::*;

const CLUSTER: &[&str] = &["4090", "3060", "2080", "1060", "mac", "cpu"];

pub(super) fn alone() -> Vec<Case> {
    use MemoryProfile::{Balanced, CpuOnly, Extreme, FullGpu, GpuPoor};
    vec![
        // Each family on each machine alone: does it fit, and how.
        case("sd lora, 24 GB", &["4090"], lora("sd1"), "4090 full_gpu", &["free"]),
        case("sd lora, 12 GB", &["3060"], lora("sd1"), "3060 full_gpu", &[]),
        case("sd lora, 8 GB", &["2080"], lora("sd1"), "2080 full_gpu", &[]),
        case("sd lora, 6 GB", &["1060"], lora("sd1"), "1060 full_gpu", &[]),
        case("sd lora, Mac", &["mac"], lora("sd1"), "mac full_gpu", &[]),
        case("sd lora, CPU only", &["cpu"], lora("sd1"), "cpu cpu_only", &["a guess"]),
        case("sdxl lora, 24 GB", &["4090"], lora("sdxl"), "4090 full_gpu", &[]),
        case(
            "sdxl lora, 12 GB",
            &["3060"],
            lora("sdxl"),
            "3060 full_gpu",
            &["of 11.0 GiB"],
        ),
        case(
            "sdxl lora, 8 GB: possible, quantised",
            &["2080"],
            lora("sdxl"),
            "2080 gpu_poor",
            &[],
        ),
        case(
            "sdxl lora, 6 GB: half of the U-Net streamed",
            &["1060"],
            lora("sdxl"),
            "1060 gpu_poor",
            &[],
        ),
        case("sdxl lora, Mac", &["mac"], lora("sdxl"), "mac full_gpu", &[]),
        case(
            "flux lora, 24 GB: 8-bit base",
            &["4090"],
            lora("flux"),
            "4090 gpu_poor",
            &[],
        ),
        case(
            "flux lora, 12 GB: blocks streamed",
            &["3060"],
            lora("flux"),
            "3060 extreme",
            &[],
        ),
        case(
            "flux lora, 8 GB: blocks streamed",
            &["2080"],
            lora("flux").set("/network/linear", json!(4)),
            "2080 extreme",
            &[],
        ),
        case(
            "flux lora, 6 GB: blocks streamed",
            &["1060"],
            lora("flux"),
            "1060 extreme",
            &[],
        ),
        case(
            "flux lora with two images at a time, 6 GB: too small, and says how much is missing",
            &["1060"],
            lora("flux").set("/train/batch_size", json!(2)),
            "waits",
            &[
                "it needs about",
                "profile extreme",
                "has is 5.2 GiB",
                "cluster.memory_budget",
            ],
        ),
        case("flux lora, Mac: all of it", &["mac"], lora("flux"), "mac full_gpu", &[]),
        case(
            "flux lora, CPU: from its file",
            &["cpu"],
            lora("flux"),
            "cpu extreme",
            &["a guess"],
        ),
        case(
            "sdxl images in f16, 12 GB: decoded in float32",
            &["3060"],
            images("sdxl"),
            "3060 balanced",
            &[],
        ),
        case(
            "sdxl images in bf16, 16 GB of a 24 GB card",
            &["4090"],
            images("sdxl").set("/model/dtype", json!("bfloat16")),
            "4090 full_gpu",
            &["of 22.0 GiB"],
        ),
        case("sdxl images, 8 GB", &["2080"], images("sdxl"), "2080 gpu_poor", &[]),
        case(
            "sdxl images in f16, 6 GB: decoded in float32, in tiles",
            &["1060"],
            images("sdxl"),
            "1060 gpu_poor",
            &[],
        ),
        case("flux images, 24 GB", &["4090"], images("flux"), "4090 gpu_poor", &[]),
        case(
            "flux images, 6 GB: streamed",
            &["1060"],
            images("flux"),
            "1060 extreme",
            &[],
        ),
        case("sd full fine-tune, 24 GB", &["4090"], full("sd1"), "4090 full_gpu", &[]),
        case(
            "sd full fine-tune in bfloat16, 6 GB: the gradients of one block at a time",
            &["1060"],
            full("sd1"),
            "1060 gpu_poor",
            &[],
        ),
        case(
            "sd full fine-tune, 6 GB: does not fit",
            &["1060"],
            full("sd1").set("/train/dtype", json!("float32")),
            "waits",
            &["it needs about"],
        ),
        case(
            "sdxl full fine-tune with 8-bit Adam, 24 GB: float32, with the gradients of one block at a time",
            &["4090"],
            full("sdxl").set("/train/dtype", json!("float32")),
            "4090 gpu_poor",
            &[],
        ),
        case(
            "sdxl full fine-tune with 8-bit Adam in bfloat16, 24 GB: half as large",
            &["4090"],
            full("sdxl"),
            "4090 full_gpu",
            &[],
        ),
        case(
            "sdxl full fine-tune with Adafactor, 24 GB: the gradients of one block at a time",
            &["4090"],
            large(),
            "4090 gpu_poor",
            &[],
        ),
        case(
            "the same with four images at once",
            &["4090"],
            large().set("/train/batch_size", json!(4)),
            "4090 gpu_poor",
            &[],
        ),
        case(
            "flux full fine-tune, 24 GB: no",
            &["4090"],
            full("flux"),
            "waits",
            &["it needs about"],
        ),
        case(
            "a quantised base by its config",
            &["4090"],
            lora("flux")
                .set("/model/quantize", json!(true))
                .set("/model/quantize_te", json!(false)),
            "4090 balanced",
            &[],
        ),
        case(
            "text encoders in 8 bits beside the base",
            &["4090"],
            lora("flux").set("/model/quantize", json!(true)),
            "4090 full_gpu",
            &["of 22.0 GiB"],
        ),
        case(
            "a base in 8 bits, offloaded in part",
            &["3060"],
            lora("flux").set("/model/quantize", json!(true)),
            "3060 gpu_poor",
            &["of 11.0 GiB"],
        ),
        case(
            "a large batch takes a smaller profile",
            &["3060"],
            lora("sdxl").set("/train/batch_size", json!(6)),
            "3060 balanced",
            &[],
        ),
        case(
            "f32 takes a smaller profile",
            &["3060"],
            train("sdxl", 1024, "float32", 16),
            "3060 gpu_poor",
            &[],
        ),
        case(
            "without gradient checkpointing it takes more, so the profile turns it on",
            &["3060"],
            lora("sdxl").set("/train/gradient_checkpointing", json!(false)),
            "3060 gpu_poor",
            &[],
        ),
        // The config takes precedence.
        case(
            "a budget in the config wins over the prediction",
            &["1060"],
            lora("flux").memory(5),
            "1060 extreme",
            &["5.0 GiB of 5.2 GiB"],
        ),
        case(
            "a budget that no worker has",
            &["4090"],
            lora("sd1").memory(30),
            "waits",
            &["asks for 30.0 GiB", "22.0 GiB"],
        ),
        case(
            "a profile in the config",
            &["4090"],
            lora("sd1").profile(GpuPoor),
            "4090 gpu_poor",
            &[],
        ),
        case(
            "a profile that does not fit",
            &["3060"],
            lora("flux").profile(FullGpu),
            "waits",
            &["profile full_gpu"],
        ),
        case(
            "a profile for GPUs on a CPU",
            &["cpu"],
            lora("sd1").profile(FullGpu),
            "waits",
            &["no connected device is a GPU"],
        ),
        case(
            "a small profile on a CPU",
            &["cpu"],
            lora("sd1").profile(Balanced),
            "cpu balanced",
            &[],
        ),
        case(
            "a profile for CPUs on a GPU",
            &["4090"],
            lora("sd1").profile(CpuOnly),
            "waits",
            &["no connected device is a CPU"],
        ),
        case(
            "nothing known: the device's own profile",
            &["3060"],
            unknown(),
            "3060 balanced",
            &["the need is unknown"],
        ),
        case(
            "nothing known, least memory",
            &["1060"],
            unknown().profile(Extreme),
            "1060 extreme",
            &[],
        ),
    ]
}

pub(super) fn mixed() -> Vec<Case> {
    vec![
        // The whole cluster idle: fastest that fits, and the smallest of equals.
        case(
            "sd lora leaves the large cards to others",
            CLUSTER,
            lora("sd1"),
            "1060 full_gpu",
            &[],
        ),
        case(
            "sdxl lora goes where it needs no tricks",
            CLUSTER,
            lora("sdxl").set("/train/batch_size", json!(6)),
            "4090 full_gpu",
            &["3060 cuda:0: balanced"],
        ),
        case(
            "flux lora goes to the large card, not to the slower Mac",
            CLUSTER,
            lora("flux"),
            "4090 gpu_poor",
            &["mac metal:0: full_gpu"],
        ),
        case(
            "flux lora without the large card",
            &["3060", "mac", "cpu"],
            lora("flux"),
            "3060 extreme",
            &[],
        ),
        case("sd images", CLUSTER, images("sd1"), "1060 full_gpu", &[]),
        case(
            "a kind that was asked for",
            CLUSTER,
            lora("sd1").on(DeviceKind::Metal),
            "mac full_gpu",
            &["the job asks for metal"],
        ),
        case(
            "the CPU, if asked for",
            CLUSTER,
            lora("sd1").on(DeviceKind::Cpu),
            "cpu cpu_only",
            &[],
        ),
        case(
            "a kind that no worker has",
            &["4090"],
            lora("sd1").on(DeviceKind::Metal),
            "waits",
            &["of kind metal"],
        ),
        // Measured speeds take precedence over guesses.
        case(
            "the faster of two cards",
            &["4090", "1060"],
            lora("sd1"),
            "4090 full_gpu",
            &[],
        )
        .setup(|setup| {
            setup.speeds = vec![
                ("NVIDIA GeForce RTX 4090", "sd1", 0.01),
                ("NVIDIA GeForce GTX 1060", "sd1", 0.06),
            ]
        }),
        case(
            "a Mac that was measured faster",
            &["2080", "mac"],
            lora("sdxl"),
            "mac full_gpu",
            &[],
        )
        .setup(|setup| setup.speeds = vec![("Apple M4 Max", "sdxl", 0.05), ("NVIDIA GeForce RTX 2080", "sdxl", 0.2)]),
        case(
            "a speed of another family says nothing",
            &["4090", "1060"],
            lora("sd1"),
            "1060 full_gpu",
            &[],
        )
        .setup(|setup| setup.speeds = vec![("NVIDIA GeForce RTX 4090", "sdxl", 0.01)]),
        case(
            "full speed on a slow card or tricks on a fast one",
            &["3060", "mac"],
            lora("sdxl").set("/train/batch_size", json!(6)),
            "3060 balanced",
            &[],
        ),
        // Busy devices.
        case(
            "the next best when the best is busy",
            &["4090", "3060"],
            lora("sdxl"),
            "3060 full_gpu",
            &["busy with r0"],
        )
        .running(large()),
        case(
            "a GPU is waited for rather than days on a CPU",
            &["4090", "cpu"],
            lora("sdxl"),
            "waits",
            &["the one device that fits is busy"],
        )
        .running(large()),
        case(
            "why not the CPU",
            &["4090", "cpu"],
            lora("sdxl"),
            "waits",
            &["times as long as on 4090"],
        )
        .running(large()),
        case(
            "the Mac rather than waiting",
            &["4090", "mac"],
            lora("flux"),
            "mac full_gpu",
            &[],
        )
        .running(lora("flux")),
        case(
            "small tasks share a large card",
            &["4090"],
            lora("sd1"),
            "4090 full_gpu",
            &["running"],
        )
        .running(lora("sd1")),
        case(
            "an idle card before a shared one",
            &["4090", "3060"],
            images("sd1"),
            "3060 full_gpu",
            &[],
        )
        .running(large()),
        case(
            "two that do not fit together",
            &["4090"],
            lora("flux"),
            "waits",
            &["busy with r0"],
        )
        .running(lora("sd1")),
        case(
            "a small one does not start beside a large one",
            &["4090"],
            images("sd1"),
            "waits",
            &["busy with r0"],
        )
        .running(lora("flux")),
        case(
            "an exclusive job gets a device of its own",
            &["4090"],
            lora("sd1"),
            "waits",
            &["busy"],
        )
        .running(lora("sd1").with(|requirements| requirements.exclusive = true)),
        case(
            "no job shares a device with one whose need is not known",
            &["4090"],
            lora("sd1"),
            "waits",
            &["busy"],
        )
        .running(unknown()),
        case("a CPU is not shared", &["cpu"], lora("sd1"), "waits", &["busy"]).running(lora("sd1")),
        case(
            "at most three share a card",
            &["4090"],
            images("sd1"),
            "waits",
            &["busy"],
        )
        .running(images("sd1"))
        .running(images("sd1"))
        .running(images("sd1")),
        // Cached inputs, earlier failures, drains, labels and quotas.
        case(
            "where its data lies",
            &["3060", "3060.2"],
            lora("sd1"),
            "3060-2 full_gpu",
            &[],
        )
        .setup(|setup| setup.cached = vec!["3060.2"]),
        case(
            "data does not make up for a slow device",
            &["4090", "mac"],
            lora("sdxl"),
            "4090 full_gpu",
            &[],
        )
        .setup(|setup| setup.cached = vec!["mac"]),
        case(
            "not where it failed a moment ago",
            &["1060", "3060"],
            lora("sd1"),
            "3060 full_gpu",
            &[],
        )
        .setup(|setup| setup.failed_on = Some("1060")),
        case(
            "there again when there is no other",
            &["1060"],
            lora("sd1"),
            "1060 full_gpu",
            &[],
        )
        .setup(|setup| setup.failed_on = Some("1060")),
        case(
            "a drained machine gets nothing",
            &["1060", "3060"],
            lora("sd1"),
            "3060 full_gpu",
            &["1060 is drained"],
        )
        .setup(|setup| setup.drained = vec!["1060"]),
        case("all are drained", &["3060"], lora("sd1"), "waits", &["3060 is drained"])
            .setup(|setup| setup.drained = vec!["3060"]),
        case(
            "a drained GPU lets the CPU work",
            &["4090", "cpu"],
            lora("sd1"),
            "cpu cpu_only",
            &[],
        )
        .setup(|setup| setup.drained = vec!["4090"]),
        case(
            "a label",
            &["1060", "3060"],
            lora("sd1").with(|requirements| {
                requirements.labels.insert("room".into(), "b".into());
            }),
            "3060 full_gpu",
            &["lacks the label room: b"],
        )
        .setup(|setup| setup.labels = vec![("3060", "room", "b")]),
        case(
            "a label that no worker has",
            &["3060"],
            lora("sd1").with(|requirements| {
                requirements.labels.insert("room".into(), "b".into());
            }),
            "waits",
            &["not found: room: b"],
        ),
        case(
            "an extension that one worker allows",
            &["1060", "3060"],
            lora("sd1").with(|requirements| {
                requirements.labels.insert("extension:x".into(), "allowed".into());
            }),
            "3060 full_gpu",
            &["does not allow the extension `x`"],
        )
        .setup(|setup| setup.labels = vec![("3060", "extension:x", "allowed")]),
        case(
            "an extension that no worker allows",
            &["3060"],
            lora("sd1").with(|requirements| {
                requirements.labels.insert("extension:x".into(), "allowed".into());
            }),
            "waits",
            &["no connected worker allows the extension `x`", "--allow-extension x="],
        ),
        case(
            "a user at the quota",
            &["3060", "2080"],
            lora("sd1"),
            "waits",
            &["user default may hold 1 device at once"],
        )
        .running(full("sd1"))
        .setup(|setup| setup.quota = Some(1)),
        case(
            "no machine at all",
            &[],
            lora("sd1"),
            "waits",
            &["no worker is connected"],
        ),
    ]
}
