//! The file of a SentencePiece model (google/sentencepiece, `sentencepiece_model.proto`): the fields that are needed.

use prost::Message;

/// A vocabulary with what is done to texts.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    pub(super) trainer_spec: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    pub(super) normalizer_spec: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Piece {
    #[prost(string, tag = "1")]
    pub(super) piece: String,
    #[prost(float, tag = "2")]
    pub(super) score: f32,
    /// [`NORMAL`] if it is missing.
    #[prost(int32, optional, tag = "3")]
    pub(super) kind: Option<i32>,
}

/// Types of pieces.
pub(super) const NORMAL: i32 = 1;
pub(super) const UNKNOWN: i32 = 2;
pub(super) const CONTROL: i32 = 3;
pub(super) const USER_DEFINED: i32 = 4;
pub(super) const UNUSED: i32 = 5;

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrainerSpec {
    /// [`UNIGRAM`] if it is missing.
    #[prost(int32, optional, tag = "3")]
    pub(super) model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    pub(super) treat_whitespace_as_suffix: Option<bool>,
    #[prost(bool, optional, tag = "35")]
    pub(super) byte_fallback: Option<bool>,
    #[prost(int32, optional, tag = "40")]
    pub(super) unk_id: Option<i32>,
    /// 1 if it is missing; -1: none.
    #[prost(int32, optional, tag = "41")]
    pub(super) bos_id: Option<i32>,
    /// 2 if it is missing; -1: none.
    #[prost(int32, optional, tag = "42")]
    pub(super) eos_id: Option<i32>,
}

/// Values of `model_type`.
pub(super) const UNIGRAM: i32 = 1;
pub(super) const BPE: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct NormalizerSpec {
    #[prost(bytes = "vec", optional, tag = "2")]
    pub(super) precompiled_charsmap: Option<Vec<u8>>,
    /// True if it is missing, and so are the next two.
    #[prost(bool, optional, tag = "3")]
    pub(super) add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    pub(super) remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    pub(super) escape_whitespaces: Option<bool>,
}
