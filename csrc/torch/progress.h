// Which gradients of this step are complete, and whether backward() may wait for them now.
//
// A rank waits at the end of the outermost backward() in which the last of its eager gradients was sent. Eager are
// gradients that every rank completed in backward when that was looked at last, so none of them waits for what another
// rank sends in synchronize() only. The others, such as those of a head that some ranks do not use, are reduced in
// synchronize() or step() as in Horovod. Waiting is a matter of each rank: it changes no collective.
#pragma once

#include <functional>
#include <vector>

#include "torch/parameter.h"

namespace poseidon {

// Guarded by the session's mutex.
class Progress {
 public:
  // first: called when the first gradient of a step is about to be complete.
  Progress(std::vector<Parameter>& parameters, std::function<void()> first)
      : parameters_(parameters), first_(std::move(first)) {}

  // From what ranks have agreed on, and from the routes: gradients that travel together are eager together. A frozen
  // parameter, which will get no gradient, is not waited for: its zeros are sent with the last of the others.
  void ChooseEager();
  // A gradient has become complete, or the factors that stand for it have. `seconds` from the step's beginning.
  void Note(Parameter& parameter, double seconds);
  void EndStep();
  // As EndStep, for a step that has ended well.
  void NoteEndOfWalks();

  int complete() const { return complete_; }
  bool any_eager() const { return eager_ > 0; }
  bool any_eager_complete() const { return settled_ > 0; }
  bool all_eager_complete() const { return settled_ == eager_; }
  // As far as earlier steps tell, more walks may follow in this one.
  bool may_bring_more_walks() const { return walks_ < usual_walks_; }

 private:
  std::vector<Parameter>& parameters_;
  const std::function<void()> first_;
  int complete_ = 0;
  int eager_ = 0;  // parameters that are eager, and how many of them are complete
  int settled_ = 0;
  int walks_ = 0;  // that completed gradients; the last of them; and of the last step that had any
  int last_walk_ = -1;
  int usual_walks_ = 0;
};

}  // namespace poseidon
