//! The relative position bias of T5: one number per head and bucket of distances.

use candle_core::{Device, Result, Tensor};

/// The bucket of a distance (key position minus query position) for bidirectional attention
/// (`T5Attention._relative_position_bucket` of transformers). Half of the buckets are for keys behind the query. In each
/// half, small distances have a bucket of their own, larger ones share buckets that grow logarithmically up to
/// `max_distance`.
fn bucket(distance: i64, buckets: usize, max_distance: usize) -> u32 {
    let half = buckets / 2;
    let offset = if distance > 0 { half } else { 0 };
    let distance = usize::try_from(distance.unsigned_abs()).unwrap_or(usize::MAX);
    let exact = half / 2;
    if distance < exact {
        return (offset + distance) as u32;
    }
    // In f32, as transformers computes it.
    let ratio = (distance as f32 / exact as f32).ln() / (max_distance as f32 / exact as f32).ln();
    let large = exact.saturating_add((ratio * (half - exact) as f32) as usize);
    (offset + large.min(half - 1)) as u32
}

/// The bias of the scores, [1, heads, length, length]. `table`: [buckets, heads].
///
/// # Errors
/// When the device fails.
pub(super) fn relative_position_bias(table: &Tensor, length: usize, max_distance: usize) -> Result<Tensor> {
    let (buckets, heads) = table.dims2()?;
    // Heads first: a transposition of the result took a fifth of the time of a layer of T5 XXL.
    let table = table.t()?.contiguous()?;
    // The buckets of all distances, from the last query's to the first key up to the first query's to the last key.
    let farthest = length.saturating_sub(1) as i64;
    let of_distances: Vec<u32> = (-farthest..=farthest)
        .map(|distance| bucket(distance, buckets, max_distance))
        .collect();
    let ids: Vec<u32> = (0..length)
        .flat_map(|query| &of_distances[length - 1 - query..2 * length - 1 - query])
        .copied()
        .collect();
    let ids = Tensor::from_vec(ids, length * length, &Device::Cpu)?.to_device(table.device())?;
    table.index_select(&ids, 1)?.reshape((1, heads, length, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_keys_have_buckets_of_their_own() {
        let of = |distance| bucket(distance, 32, 128);
        assert_eq!(
            [of(0), of(-1), of(-7), of(-8), of(-127), of(-128), of(-5000)],
            [0, 1, 7, 8, 15, 15, 15]
        );
        assert_eq!([of(1), of(7), of(8), of(128), of(i64::MAX)], [17, 23, 24, 31, 31]);
    }
}
