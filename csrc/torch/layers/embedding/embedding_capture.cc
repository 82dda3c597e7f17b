#include "torch/layers/embedding/embedding_capture.h"

#include <ATen/ops/embedding_bag_native.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "torch/layers/capture.h"
#include "torch/layers/embedding/embedding_layer.h"

namespace poseidon {

namespace {

namespace ag = torch::autograd;

at::Tensor ToIds(const at::Tensor& ids) { return ids.reshape({-1}).to(at::kLong).contiguous(); }

// What both kinds of calls do with their rows.
class TableBackward : public CaptureNode {
 protected:
  TableBackward(Registration registration, const at::Tensor& weight, const at::Tensor& weight_leaf, bool by_frequency,
                bool sparse)
      : CaptureNode(std::move(registration), weight, weight_leaf),
        table_rows_(weight.size(0)),
        by_frequency_(by_frequency),
        sparse_(sparse) {}

  // Hands what make_rows() gives to the owner: an optional<TableRows> without frequency, nothing if it cannot be told.
  // True: the table's gradient is taken care of.
  template <typename MakeRows>
  bool Deliver(const at::Tensor& d, MakeRows make_rows) {
    // create_graph: ordinary differentiable gradients for everything.
    if (at::GradMode::is_enabled() || !IsPlain(d)) return false;
    const auto owner = this->owner();
    if (!WeightEndsInGrad(0)) {
      if (owner && this->layer().mode() == FactoredLayer::Mode::kCapture) owner->OnDeclined(this->layer());
      return false;
    }
    auto& layer = static_cast<EmbeddingLayer&>(this->layer());
    const FactoredLayer::Mode mode = layer.mode();
    if (!owner || mode == FactoredLayer::Mode::kBypass) return false;
    const bool capture = mode == FactoredLayer::Mode::kCapture;
    if (capture && layer.settings().sparse != sparse_) return false;
    std::optional<TableRows> rows = make_rows();
    if (!rows) return false;
    rows->sparse = sparse_;
    if (by_frequency_) DivideByFrequency(&*rows);
    if (capture) return owner->OnCaptured(layer, *rows);
    owner->OnProfiled(layer, *rows);
    return false;
  }

  const int64_t table_rows_;
  const bool by_frequency_;
  const bool sparse_;
  bool released_ = false;
};

class EmbeddingBackward final : public TableBackward {
 public:
  EmbeddingBackward(Registration registration, const at::Tensor& weight, const at::Tensor& weight_leaf,
                    const at::Tensor& ids, int64_t padding, bool by_frequency, bool sparse)
      : TableBackward(std::move(registration), weight, weight_leaf, by_frequency, sparse),
        padding_(padding),
        ids_(ids, /*is_output=*/false) {}

  std::string name() const override { return "PoseidonEmbeddingBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    ids_.reset_data();
    released_ = true;
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ag::variable_list out(1);
    const at::Tensor d = std::move(grads[0]);
    if (!d.defined()) return out;
    TORCH_CHECK(!released_, ag::ERR_BACKWARD_TWICE);
    const at::Tensor ids = ids_.unpack();
    if (!task_should_compute_output(0)) return out;
    const bool taken = Deliver(d, [&]() -> std::optional<TableRows> {
      TableRows rows;
      rows.ids = ToIds(ids);
      rows.d = Rows(d, d.size(-1)).contiguous();
      rows.padding = padding_;
      return rows;
    });
    if (!taken) out[0] = at::embedding_backward(d, ids, table_rows_, padding_, by_frequency_, sparse_);
    return out;
  }

 private:
  const int64_t padding_;
  ag::SavedVariable ids_;
};

// The arguments of aten::embedding_bag that are no tensors.
struct BagOptions {
  int64_t mode = 0;  // 0: sum, 1: mean, 2: max
  bool sparse = false;
  bool include_last_offset = false;
  int64_t padding = -1;
};

// Which bag each id is in, and its weight there. Nothing if the offsets do not cover the ids.
std::optional<TableRows> BagRows(const at::Tensor& d, const at::Tensor& ids, const at::Tensor& offsets,
                                 const at::Tensor& sample_weights, const BagOptions& options) {
  TableRows rows;
  rows.ids = ToIds(ids);
  rows.d = d.contiguous();
  rows.padding = options.padding;
  const int64_t count = rows.ids.numel();
  const int64_t bags = rows.d.size(0);
  const at::Tensor starts = ToIds(offsets);
  if (starts.numel() != bags + (options.include_last_offset ? 1 : 0)) return std::nullopt;
  const int64_t* id = rows.ids.const_data_ptr<int64_t>();
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const bool mean = options.mode == 1;
  rows.source.resize(count);
  if (mean || sample_weights.defined()) rows.coefficient.assign(count, 1.0);
  int64_t next = 0;
  for (int64_t bag = 0; bag < bags; ++bag) {
    const int64_t end = bag + 1 < starts.numel() ? start[bag + 1] : count;
    if (start[bag] != next || end < next || end > count) return std::nullopt;
    int64_t used = 0;
    for (int64_t i = next; i < end; ++i) {
      rows.source[i] = bag;
      used += id[i] != options.padding;
    }
    for (int64_t i = next; mean && used > 0 && i < end; ++i) rows.coefficient[i] = 1.0 / static_cast<double>(used);
    next = end;
  }
  if (next != count) return std::nullopt;
  if (sample_weights.defined()) {
    const at::Tensor weights = sample_weights.to(at::kDouble).contiguous();
    for (int64_t i = 0; i < count; ++i) rows.coefficient[i] *= weights.const_data_ptr<double>()[i];
  }
  return rows;
}

class EmbeddingBagBackward final : public TableBackward {
 public:
  EmbeddingBagBackward(Registration registration, const at::Tensor& weight, const at::Tensor& weight_leaf,
                       const at::Tensor& ids, const at::Tensor& offsets, const at::Tensor& sample_weights,
                       const BagOptions& options)
      : TableBackward(std::move(registration), weight, weight_leaf, /*by_frequency=*/false, options.sparse),
        options_(options),
        ids_(ids, /*is_output=*/false),
        offsets_(offsets, /*is_output=*/false),
        sample_weights_(sample_weights, /*is_output=*/false) {
    if (sample_weights.defined() && sample_weights.requires_grad()) {
      weight_ = ag::SavedVariable(OverTheSameMemory(weight),
                                  /*is_output=*/false);  // as it is now, whatever .data is assigned later
    }
  }

  // After the forward: what it found out of the offsets, for PyTorch's own backward.
  void Keep(const at::Tensor& offset2bag, const at::Tensor& bag_size, const at::Tensor& max_indices) {
    offset2bag_ = ag::SavedVariable(offset2bag, /*is_output=*/false);
    bag_size_ = ag::SavedVariable(bag_size, /*is_output=*/false);
    max_indices_ = ag::SavedVariable(max_indices, /*is_output=*/false);
  }

  std::string name() const override { return "PoseidonEmbeddingBagBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (ag::SavedVariable* saved :
         {&ids_, &offsets_, &sample_weights_, &weight_, &offset2bag_, &bag_size_, &max_indices_}) {
      saved->reset_data();
    }
    released_ = true;
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ag::variable_list out(2);
    const at::Tensor d = std::move(grads[0]);
    if (!d.defined()) return out;
    TORCH_CHECK(!released_, ag::ERR_BACKWARD_TWICE);
    const at::Tensor ids = ids_.unpack();
    const at::Tensor offsets = offsets_.unpack();
    const at::Tensor sample_weights = sample_weights_.unpack();
    at::Tensor weight = weight_.unpack();
    if (weight.defined() && at::GradMode::is_enabled()) weight = ag::make_variable(weight, next_edge(0));
    const at::Tensor offset2bag = offset2bag_.unpack();
    const at::Tensor bag_size = bag_size_.unpack();
    const at::Tensor max_indices = max_indices_.unpack();
    if (task_should_compute_output(0) &&
        !Deliver(d, [&] { return BagRows(d, ids, offsets, sample_weights, options_); })) {
      const std::optional<at::Tensor> weights =
          sample_weights.defined() ? std::make_optional(sample_weights) : std::nullopt;
      out[0] = at::_embedding_bag_backward(d, ids, offsets, offset2bag, bag_size, max_indices, table_rows_,
                                           by_frequency_, options_.mode, sparse_, weights, options_.padding);
    }
    if (weight.defined() && task_should_compute_output(1)) {
      out[1] = at::_embedding_bag_per_sample_weights_backward(d, weight, ids, offsets, offset2bag, options_.mode,
                                                              options_.padding);
    }
    return out;
  }

 private:
  const BagOptions options_;
  ag::SavedVariable ids_;
  ag::SavedVariable offsets_;
  ag::SavedVariable sample_weights_;
  ag::SavedVariable weight_;  // if the sample weights want a gradient
  ag::SavedVariable offset2bag_;
  ag::SavedVariable bag_size_;
  ag::SavedVariable max_indices_;
};

// The layer that wants this call's rows; none for most calls.
std::optional<Registration> Wanted(const at::Tensor& weight, const at::Tensor& ids, bool by_frequency, bool sparse,
                                   at::Tensor* leaf) {
  if (!AnyRegistered() || !at::GradMode::is_enabled()) return std::nullopt;
  *leaf = LeafOf(weight);
  if (!leaf->defined()) return std::nullopt;
  // Who watches comes first: sizes may be symbols.
  if (SomebodyWatches() || !IsPlain(weight) || !IsPlain(ids) || weight.dim() != 2) return std::nullopt;
  std::optional<Registration> registration = FindLayer(FactoredLayer::Kind::kEmbedding, *leaf, ids.numel());
  const bool refused = sparse && by_frequency;  // by PyTorch itself, in backward
  if (!registration || refused) return std::nullopt;
  return registration;  // hooks are looked for in backward
}

at::Tensor Embedding(c10::DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& ids, c10::SymInt padding,
                     bool by_frequency, bool sparse) {
  at::Tensor leaf;
  std::optional<Registration> registration = Wanted(weight, ids, by_frequency, sparse, &leaf);
  const std::optional<int64_t> padding_id = padding.maybe_as_int();
  if (!registration || !padding_id) {
    // This kernel stands in the place of PyTorch's own, which is still there for backends without a name. Keys above
    // autograd have had their turn, but may still be in the set (PythonDispatcher) and would come back here for ever.
    const c10::DispatchKeySet others = (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
    return at::_ops::embedding::redispatch(others, weight, ids, std::move(padding), by_frequency, sparse);
  }
  NodePtr node =
      MakeNode<EmbeddingBackward>(*std::move(registration), weight, leaf, ids, *padding_id, by_frequency, sparse);
  node->set_next_edges(ag::collect_next_edges(weight));
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::embedding(weight, ids, *padding_id, by_frequency, sparse);
  }
  ag::set_history(y, node);
  return y;
}

using BagResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

BagResult EmbeddingBag(const at::Tensor& weight, const at::Tensor& ids, const at::Tensor& offsets, bool by_frequency,
                       int64_t mode, bool sparse, const std::optional<at::Tensor>& sample_weights,
                       bool include_last_offset, std::optional<int64_t> padding) {
  const auto ordinary = [&] {
    return at::native::embedding_bag(weight, ids, offsets, by_frequency, mode, sparse, sample_weights,
                                     include_last_offset, padding);
  };
  at::Tensor leaf;
  std::optional<Registration> registration = Wanted(weight, ids, by_frequency, sparse, &leaf);
  const at::Tensor weights = sample_weights.value_or(at::Tensor());
  // by_frequency: PyTorch 2.13 divides by the frequency of other ids than the row's, so its gradient is not a sum of
  // such rows.
  if (!registration || by_frequency || (mode != 0 && mode != 1) || ids.dim() != 1 || offsets.dim() != 1 ||
      !IsPlain(offsets) || (weights.defined() && !IsPlain(weights))) {
    return ordinary();
  }
  BagOptions options;
  options.mode = mode;
  options.sparse = sparse;
  options.include_last_offset = include_last_offset;
  if (padding) options.padding = *padding < 0 ? *padding + weight.size(0) : *padding;
  auto node = MakeNode<EmbeddingBagBackward>(*std::move(registration), weight, leaf, ids.contiguous(),
                                             offsets.contiguous(), weights, options);
  node->set_next_edges(ag::collect_next_edges(weight, weights));
  BagResult result;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = ordinary();
  }
  static_cast<EmbeddingBagBackward&>(*node).Keep(std::get<1>(result), std::get<2>(result), std::get<3>(result));
  ag::set_history(std::get<0>(result), node);
  return result;
}

BagResult EmbeddingBagWithoutPadding(const at::Tensor& weight, const at::Tensor& ids, const at::Tensor& offsets,
                                     bool by_frequency, int64_t mode, bool sparse,
                                     const std::optional<at::Tensor>& sample_weights, bool include_last_offset) {
  return EmbeddingBag(weight, ids, offsets, by_frequency, mode, sparse, sample_weights, include_last_offset,
                      std::nullopt);
}

}  // namespace

void AddEmbeddingKernels(torch::Library& library) {
  library.impl("embedding", TORCH_FN(Embedding));
  library.impl("embedding_bag", TORCH_FN(EmbeddingBagWithoutPadding));
  library.impl("embedding_bag.padding_idx", TORCH_FN(EmbeddingBag));
}

}  // namespace poseidon
