// The user's hook before reduction.
#include "torch/session.h"

namespace poseidon {

// Without the lock, because the hook may ask the optimizer something. It has run once it has ended: after an exception
// synchronize() tries again, so that no gradient is sent that it has not seen.
void Session::RunHook(Parameter& p, std::unique_lock<std::mutex>* lock) {
  const at::Tensor grad = p.tensor.grad();
  if (p.hook_ran || !grad.defined()) return;
  lock->unlock();
  options_.before(static_cast<int>(&p - parameters_.data()), grad);
  lock->lock();
  p.hook_ran = true;
}

}  // namespace poseidon
