//! One optimizer for each learning rate: tensors whose rate is a multiple of the schedule's, as PyTorch's parameter groups.

use super::optimizer::{Grads, OptimError, Optimizer, Param, check_grad_count};
use candle_core::Tensor;
use std::collections::BTreeMap;

/// Tensors with one learning rate.
struct Group {
    /// Their positions in the list of all.
    members: Vec<usize>,
    /// Their learning rate is this many times the schedule's.
    factor: f64,
    optimizer: Box<dyn Optimizer>,
}

/// An optimizer of tensors with different learning rates.
struct Groups {
    params: Vec<Param>,
    groups: Vec<Group>,
}

/// Builds an optimizer whose tensors have these factors of the learning rate. `build`: the optimizer of some of them.
///
/// # Errors
/// As `build`.
pub(super) fn build(
    params: Vec<Param>,
    factors: &[f64],
    build: impl Fn(Vec<Param>) -> Result<Box<dyn Optimizer>, OptimError>,
) -> Result<Box<dyn Optimizer>, OptimError> {
    let mut members: Vec<(f64, Vec<usize>)> = Vec::new();
    for (index, factor) in factors.iter().enumerate().take(params.len()) {
        match members.iter_mut().find(|(other, _)| other == factor) {
            Some((_, indices)) => indices.push(index),
            None => members.push((*factor, vec![index])),
        }
    }
    if members.iter().all(|(factor, _)| *factor == 1.0) {
        return build(params);
    }
    let mut groups = Vec::new();
    for (factor, members) in members {
        let own = members.iter().filter_map(|index| params.get(*index)).cloned().collect();
        groups.push(Group {
            members,
            factor,
            optimizer: build(own)?,
        });
    }
    Ok(Box::new(Groups { params, groups }))
}

impl Groups {
    /// The group that the state of a tensor belongs to: that of the tensor with the longest name that the state's name begins with.
    fn group_of(&self, state: &str) -> Option<usize> {
        let owns = |param: &&Param| {
            state
                .strip_prefix(&param.name)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        let owner = self.params.iter().filter(owns).max_by_key(|param| param.name.len())?;
        let index = self.params.iter().position(|param| param.name == owner.name)?;
        self.groups.iter().position(|group| group.members.contains(&index))
    }
}

impl Optimizer for Groups {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        for group in &mut self.groups {
            let own: Grads = group
                .members
                .iter()
                .map(|index| grads.get(*index).cloned().flatten())
                .collect();
            if own.iter().any(Option::is_some) {
                group.optimizer.step(&own, lr * group.factor)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut all = BTreeMap::new();
        for group in &self.groups {
            all.extend(group.optimizer.state()?);
        }
        Ok(all)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut parts: Vec<BTreeMap<String, Tensor>> = self.groups.iter().map(|_| BTreeMap::new()).collect();
        for (name, tensor) in state {
            // What belongs to no tensor is the first one's to refuse.
            let group = self.group_of(name).unwrap_or(0);
            if let Some(part) = parts.get_mut(group) {
                part.insert(name.clone(), tensor.clone());
            }
        }
        for (group, part) in self.groups.iter_mut().zip(&parts) {
            group.optimizer.load_state(part)?;
        }
        Ok(())
    }

    fn uses_gradient_clipping(&self) -> bool {
        self.groups.iter().all(|group| group.optimizer.uses_gradient_clipping())
    }

    fn separable(&self) -> bool {
        self.groups.iter().all(|group| group.optimizer.separable())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use aitk_common::job::optimizer::OptimizerName;
    use candle_core::{Device, Var};

    const NAMES: [&str; 4] = ["a", "a.b", "c", "d"];
    const FACTORS: [f64; 4] = [0.5, 1.0, 0.5, 0.0];
    const LR: f64 = 1e-2;

    fn params() -> Vec<Param> {
        let param = |(index, name): (usize, &&str)| Param {
            name: (*name).to_owned(),
            var: Var::from_tensor(
                &Tensor::arange(0f32, 12.0, &Device::Cpu)
                    .unwrap()
                    .affine(0.1, index as f64)
                    .unwrap()
                    .reshape((3, 4))
                    .unwrap(),
            )
            .unwrap(),
        };
        NAMES.iter().enumerate().map(param).collect()
    }

    fn grads(step: u64) -> Grads {
        let mut generator = crate::rng::TorchGenerator::manual_seed(step);
        let grad = |index: usize| {
            (index != 2 || step != 1).then(|| Tensor::from_vec(generator.randn(12), (3, 4), &Device::Cpu).unwrap())
        };
        (0..NAMES.len()).map(grad).collect()
    }

    fn of_name(name: OptimizerName, params: Vec<Param>) -> Result<Box<dyn Optimizer>, OptimError> {
        super::super::build(name, params, &serde_json::Map::new(), LR)
    }

    fn values(params: &[Param]) -> Vec<Vec<f32>> {
        params
            .iter()
            .map(|param| param.var.flatten_all().unwrap().to_vec1().unwrap())
            .collect()
    }

    #[test]
    fn each_group_is_trained_at_its_own_rate() {
        for name in [
            OptimizerName::AdamW,
            OptimizerName::AdamW8Bit,
            OptimizerName::Lion,
            OptimizerName::Adafactor,
            OptimizerName::Adagrad,
        ] {
            let (together, alone) = (params(), params());
            let mut optimizer = build(together.clone(), &FACTORS, |params| of_name(name, params)).unwrap();
            let mut own: Vec<_> = alone
                .iter()
                .map(|param| of_name(name, vec![param.clone()]).unwrap())
                .collect();
            let start = values(&together);
            for step in 0..5 {
                // The second half goes on from a saved state.
                if step == 3 {
                    let state = optimizer.state().unwrap();
                    optimizer = build(together.clone(), &FACTORS, |params| of_name(name, params)).unwrap();
                    optimizer.load_state(&state).unwrap();
                }
                let grads = grads(step);
                optimizer.step(&grads, LR).unwrap();
                for ((optimizer, grad), factor) in own.iter_mut().zip(grads).zip(FACTORS) {
                    optimizer.step(&vec![grad], LR * factor).unwrap();
                }
            }
            assert_eq!(values(&together), values(&alone), "{name}");
            let moved: Vec<bool> = values(&together)
                .iter()
                .zip(&start)
                .map(|(after, before)| after != before)
                .collect();
            assert_eq!(moved, [true, true, true, false], "{name}");
        }
    }

    #[test]
    fn a_state_of_other_tensors_is_refused() {
        let build = || build(params(), &FACTORS, |params| of_name(OptimizerName::AdamW, params)).unwrap();
        let mut state = build().state().unwrap();
        state.insert(
            "other.exp_avg".into(),
            Tensor::zeros((), candle_core::DType::F32, &Device::Cpu).unwrap(),
        );
        assert!(build().load_state(&state).is_err());
        let first = state.keys().find(|name| name.starts_with("c.")).cloned().unwrap();
        state.remove("other.exp_avg");
        state.remove(&first);
        assert!(build().load_state(&state).is_err());
    }
}
