//! `caption` of the captioning processes.

use super::declare::section;
use super::dtype::DType;
use super::process_type::ProcessType;

section! {
    /// The captioning model, its files and its settings.
    pub struct CaptionConfig("caption") {
        /// Captioning model.
        model_name_or_path [required]: String = String::new(), Works, input Model;
        /// Second model (AceStep).
        model_name_or_path2: Option<String> = None, Works, input Model;
        /// File extensions without dot.
        extensions [required]: Vec<String> = Vec::new(), Works;
        /// Folder, searched recursively.
        path_to_caption [required]: String = String::new(), Works, input Dataset;
        /// Number format of the arithmetic.
        dtype: DType = DType::BF16, Works;
        /// Device.
        device: String = "cuda".into(), Works;
        /// Quantise the weights.
        quantize: bool = false, Works;
        /// Quantisation type.
        qtype: String = "float8".into(), Works;
        /// Keep weights in RAM when idle.
        low_vram: bool = false, Works;
        /// Suffix of the captions.
        caption_extension: String = "txt".into(), Works;
        /// Overwrite captions.
        recaption: bool = false, Works;
        /// Images are shrunk to this many pixels squared.
        max_res: u32 = 512, Works;
        /// Longest answer.
        max_new_tokens: u32 = 128, Works;
        /// Let the model reason first.
        thinking: bool = false, Works;
        /// Instruction for the model.
        caption_prompt: String = "Describe this image in detail.".into(), Works;
        /// torch.compile.
        compile: bool = false, Works;
        /// Files at once (Omni).
        batch_size: u32 = 1, Works;
        /// Threads that prepare files (Omni).
        num_workers: u32 = 3, Works;
        /// Stream weights from RAM.
        layer_offloading: bool = false, Works;
        /// Share of the weights that is streamed.
        layer_offloading_percent: f64 = 1.0, Works;
        /// AceStep: use this text instead of describing.
        fixed_caption: Option<String> = None, Works;
    }
}

section! {
    /// A process that writes caption files next to media files.
    pub struct CaptionProcess("process") {
        /// Type of captioner.
        kind as "type": ProcessType = ProcessType::Qwen3VlCaptioner, Works;
        /// Name of the process.
        name: Option<String> = None, Accepted("captioners write beside the files");
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("`caption.device` is used instead");
        /// Database of ai-toolkit's web UI.
        sqlite_db_path: String = "./aitk_db.db".into(), Accepted("the web UI of ai-toolkit is not used");
        /// Settings of the captioning.
        caption [required]: CaptionConfig = CaptionConfig::default(), Works;
    }
}
