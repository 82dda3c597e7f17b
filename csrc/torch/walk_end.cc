#include "torch/walk_end.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

namespace poseidon {

namespace {

namespace ag = torch::autograd;

// In a node's walk after the node that had another walk inside.
class OuterWalkHook final : public ag::FunctionPostHook, public OwnHook {
 public:
  explicit OuterWalkHook(std::weak_ptr<WalkEnd::Owner> owner) : owner_(std::move(owner)) {}
  ag::variable_list operator()(const ag::variable_list& outputs, const ag::variable_list&) override {
    if (auto owner = owner_.lock()) owner->OnOuterWalk();
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}

 private:
  const std::weak_ptr<WalkEnd::Owner> owner_;
};

}  // namespace

void WalkEnd::Queue(std::weak_ptr<Owner> owner) {
  const int walk = CurrentWalk();
  if (walk < 0 || walk == queued_) return;
  queued_ = walk;
  ag::Engine::get_default_engine().queue_callback([owner = std::move(owner)] {
    if (auto self = owner.lock()) self->OnWalkEnd();
  });
}

bool WalkEnd::FollowOuterWalk(std::weak_ptr<Owner> owner) {
  const auto outer = ag::get_current_node();
  if (!outer) return false;
  for (const ag::Edge& edge : outer->next_edges()) {
    if (!edge.is_valid()) continue;
    hooks_.emplace_back(edge.function, edge.function->add_post_hook(std::make_unique<OuterWalkHook>(owner)));
  }
  return true;
}

void WalkEnd::RemoveHooks() {
  for (auto& [node, key] : hooks_) node->del_post_hook(key);
  hooks_.clear();
}

}  // namespace poseidon
