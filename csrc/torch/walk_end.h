// A callback at the end of the outermost walk of autograd that is running.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "torch/layers/capture.h"

namespace poseidon {

// Guarded by the owner's mutex.
class WalkEnd {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // The walk has ended in which Queue() was called.
    virtual void OnWalkEnd() = 0;
    // A node has run in a walk around it.
    virtual void OnOuterWalk() = 0;
  };

  // For the end of the walk that runs now on this thread. Nothing outside of walks, or if it is queued already.
  void Queue(std::weak_ptr<Owner> owner);
  // To be called in OnWalkEnd(). True: this walk was inside another one (reentrant checkpointing), which is not over;
  // its later nodes call OnOuterWalk(), where Queue() is to be called again.
  bool FollowOuterWalk(std::weak_ptr<Owner> owner);
  void RemoveHooks();

 private:
  int queued_ = -1;  // the walk
  std::vector<std::pair<NodePtr, uintptr_t>> hooks_;
};

}  // namespace poseidon
