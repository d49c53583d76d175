import numpy as np, triton.runtime.interpreter as I
def dot(self,a,b,d,p,m):
    r=(a.data[:,:,None]*b.data[None]).astype(d.data.dtype)
    acc=np.zeros(d.data.shape,d.data.dtype)
    for k in range(r.shape[1]): acc=acc+r[:,k]
    return I.TensorHandle(acc+d.data,d.dtype.scalar)
I.InterpreterBuilder.create_dot=dot
