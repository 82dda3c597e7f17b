// A training on ranks that are threads, each with a Session over csrc/tests/local_transport.h and autograd's own
// graphs, compared with the mean over ranks of local gradients in float64.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/local_transport.h"
#include "torch/session.h"

namespace poseidon {

using Tensors = std::vector<at::Tensor>;

// Numbers between -1 and 1 that follow from their place and `seed`, in float64; float32 holds them rounded.
inline at::Tensor Numbers(at::IntArrayRef shape, int seed) {
  const int64_t count = c10::multiply_integers(shape);
  return (at::arange(1, count + 1, at::kDouble) * (0.61 + 0.37 * seed))
      .sin()
      .to(at::kFloat)
      .to(at::kDouble)
      .view(shape);
}

struct Training {
  int ranks = 2;
  int steps = 4;
  std::vector<std::vector<int64_t>> shapes;  // of the parameters
  // Of one pass on one rank: a loss in the parameters' dtype.
  std::function<at::Tensor(const Tensors& params, int rank, int step, int pass)> loss;
  SessionOptions options;                // without what follows from the rest
  std::vector<int> reset_at;             // steps whose first attempt is given up by Reset() with gradients in flight
  std::chrono::microseconds delay{200};  // of an operation, at most
  double tolerance = 1e-5;               // of a gradient's norm
};

inline Tensors MakeParameters(const Training& training, at::ScalarType type) {
  Tensors params;
  for (size_t i = 0; i < training.shapes.size(); ++i) {
    params.push_back((Numbers(training.shapes[i], static_cast<int>(i)) * 0.4).to(type).set_requires_grad(true));
  }
  return params;
}

inline void Update(Tensors* params) {
  at::NoGradGuard no_grad;
  for (at::Tensor& p : *params) {
    if (p.grad().defined()) p.sub_(p.grad() * 0.25);
  }
}

inline void Clear(Tensors* params) {
  for (at::Tensor& p : *params) p.mutable_grad().reset();
}

inline void Backward(const Training& training, const Tensors& params, int rank, int step) {
  for (int pass = 0; pass < training.options.passes_per_step; ++pass)
    training.loss(params, rank, step, pass).backward();
}

// By step and parameter.
inline std::vector<Tensors> ReferenceGradients(const Training& training) {
  std::vector<Tensors> result;
  Tensors params = MakeParameters(training, at::kDouble);
  for (int step = 0; step < training.steps; ++step) {
    Clear(&params);
    for (int rank = 0; rank < training.ranks; ++rank) Backward(training, params, rank, step);
    Tensors means;
    for (at::Tensor& p : params) {
      if (p.grad().defined()) p.mutable_grad().div_(training.ranks);
      means.push_back(p.grad().defined() ? p.grad().clone() : at::zeros_like(p).detach());
    }
    result.push_back(std::move(means));
    Update(&params);
  }
  return result;
}

struct Trained {
  std::vector<Tensors> gradients;  // by step and parameter, after Synchronize()
  Tensors params;
  Plan plan;
  SessionStats stats;
  std::vector<std::string> warnings;
};

inline Trained TrainOn(const Training& training, LocalWorld& world, int rank) {
  Trained result;
  Tensors params = MakeParameters(training, at::kFloat);
  SessionOptions options = training.options;
  options.params = params;
  for (size_t i = 0; i < params.size(); ++i) options.names.push_back("p" + std::to_string(i));
  options.overrides.resize(params.size(), SchemeOverride::kAuto);
  options.reduction = {ReduceOp::kAverage, 1.0, 1.0};
  options.rank = rank;
  options.size = training.ranks;
  options.tag = "0";
  // The world outlives the sessions.
  const std::shared_ptr<Engine> engine(world.engines[rank].get(), [](Engine*) {});
  const std::shared_ptr<Session> session = Session::Create(engine, std::move(options));
  for (int step = 0; step < training.steps; ++step) {
    if (std::count(training.reset_at.begin(), training.reset_at.end(), step) > 0) {
      Clear(&params);
      Backward(training, params, rank, step);
      session->Reset();
    }
    Clear(&params);
    session->NoteZeroed();
    Backward(training, params, rank, step);
    session->Synchronize();
    Tensors gradients;
    for (const at::Tensor& p : params) gradients.push_back(p.grad().detach().clone());
    result.gradients.push_back(std::move(gradients));
    Update(&params);
    session->NoteUpdated();
  }
  result.plan = session->CurrentPlan();
  result.stats = session->Stats();
  result.warnings = session->TakeWarnings();
  for (const at::Tensor& p : params) result.params.push_back(p.detach().clone());
  return result;
}

// The same bits on every rank, and near the reference. Returns rank 0's.
inline Trained Check(const Training& training) {
  std::vector<Trained> ranks(training.ranks);
  {
    LocalWorld world(training.ranks, training.delay);
    RunRanks(training.ranks, [&](int rank) { ranks[rank] = TrainOn(training, world, rank); });
  }
  const std::vector<Tensors> reference = ReferenceGradients(training);
  for (int step = 0; step < training.steps; ++step) {
    for (size_t i = 0; i < training.shapes.size(); ++i) {
      const at::Tensor& ours = ranks[0].gradients[step][i];
      const double error = (ours.to(at::kDouble) - reference[step][i]).norm().item<double>();
      POSEIDON_CHECK_NEAR(error, 0.0, training.tolerance * reference[step][i].norm().item<double>() + 1e-7);
      for (const Trained& other : ranks) POSEIDON_CHECK(at::equal(other.gradients[step][i], ours));
    }
  }
  for (const Trained& other : ranks) {
    for (size_t i = 0; i < training.shapes.size(); ++i) POSEIDON_CHECK(at::equal(other.params[i], ranks[0].params[i]));
  }
  return std::move(ranks[0]);
}

}  // namespace poseidon
